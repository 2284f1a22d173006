"""A node's side of the pool: the agent that supervises, the executors that run tasks."""

"""The client's side of a cluster: nodes, lanes, scheduling, recovery, scaling."""

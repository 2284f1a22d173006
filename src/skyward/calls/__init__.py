"""A call, from `Pending` to its result."""

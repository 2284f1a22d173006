"""A simulated world for whole pools: one thread, an order and faults that a seed chooses."""

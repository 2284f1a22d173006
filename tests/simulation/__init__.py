"""A simulated world for whole pools: one thread, in an order and with faults that a seed chooses."""

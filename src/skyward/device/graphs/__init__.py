"""Compiled graphs: traced on the client, compiled and run by the worker, one message for each call.

`torch.compile` traces a model here, and Inductor's own passes split the graph into a forward and a
backward one. Each is shipped once (`text`, `client`). The worker compiles it for its own device
and runs it under its number (`runner`).
"""

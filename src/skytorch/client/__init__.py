"""What a SkyTorch program imports.

>>> from skytorch.client import Compute, compute

The submodules have SkyTorch's names too: `compute`, `cluster`, `decorator`, `event`, `init` and
`state_dict`. As attributes of this package `compute` and `init` are the functions.
"""

from __future__ import annotations

from skytorch.client.cluster import Cluster
from skytorch.client.compute import Compute
from skytorch.client.decorator import compute
from skytorch.client.event import log_event
from skytorch.client.init import default_namespace, init
from skytorch.client.state_dict import StateDict

__all__ = [
    "Cluster",
    "Compute",
    "StateDict",
    "compute",
    "default_namespace",
    "init",
    "log_event",
]

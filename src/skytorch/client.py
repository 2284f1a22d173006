"""What a SkyTorch program imports.

>>> from skytorch.client import Compute, compute
"""

from __future__ import annotations

from skytorch.cluster import Cluster
from skytorch.compute import Compute
from skytorch.decorator import compute
from skytorch.defaults import init
from skytorch.events import log_event

__all__ = ["Cluster", "Compute", "compute", "init", "log_event"]

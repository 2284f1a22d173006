"""Where `attach` and `reach` were: they are in `skyward.compute` now; gone in the next release."""

import warnings

from skyward.compute import attach as attach
from skyward.compute import reach as reach
from skyward.compute import start_pool as start_pool
from skyward.compute import stop_pool as stop_pool

warnings.warn(
    "skyward.compute.attaching is skyward.compute now; its old name goes with the next release",
    DeprecationWarning,
    stacklevel=2,
)

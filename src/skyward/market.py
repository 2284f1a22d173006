"""Where offers were: they are in `skyward.providers` now, and this goes with the next release."""

import warnings

from skyward.providers import AllocationKind as AllocationKind
from skyward.providers import Offer as Offer
from skyward.providers import check_allocation as check_allocation
from skyward.providers import check_region as check_region
from skyward.providers import money as money

warnings.warn(
    "skyward.market is skyward.providers now; its old name goes with the next release",
    DeprecationWarning,
    stacklevel=2,
)

"""Planning of shardings from calibrated cost models (imported as ``torchrec_bls.sharding``)."""
# ruff: noqa: E402

from torchrec_bls._versions import check_packages

# Before any import of torchrec, which fails with an undefined symbol where a pair does not match.
check_packages()

from .costs import ProfiledCosts
from .planner import BLSShardingPlanner
from .profile import Profile, load_profile
from .report_html import as_html
from .report_text import as_text
from .reuse import ReuseStatistics
from .torchrec_estimator import calibrated_torchrec_planner

__all__ = [
    "BLSShardingPlanner",
    "Profile",
    "ProfiledCosts",
    "ReuseStatistics",
    "as_html",
    "as_text",
    "calibrated_torchrec_planner",
    "load_profile",
]

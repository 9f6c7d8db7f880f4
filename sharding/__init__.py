"""Planning of shardings from calibrated cost models (imported as ``torchrec_bls.sharding``)."""
# ruff: noqa: E402

from importlib.util import find_spec
from typing import Any

from torchrec_bls._versions import check_packages

# Before any import of torchrec, which fails with an undefined symbol where versions do not match.
check_packages()

from .costs.link import link_of
from .costs.profile import Profile, load_profile
from .costs.profiled import ProfiledCosts
from .report.html import as_html
from .report.text import as_text
from .reuse.statistics import ReuseStatistics
from .torchrec.estimator import calibrated_torchrec_planner
from .torchrec.plan import load_plan, save_plan
from .torchrec.planner import BLSShardingPlanner

__all__ = [
    "BLSShardingPlanner",
    "Profile",
    "ProfiledCosts",
    "ReuseStatistics",
    "as_html",
    "as_text",
    "calibrated_torchrec_planner",
    "link_of",
    "load_plan",
    "load_profile",
    "save_plan",
]

# TorchRec's seams for planners, which it has from 1.9 on.
_SEAMS = ("BLSPlanReporter", "BLSPlannerProvider")
if find_spec("torchrec.distributed.planner.provider") is not None:
    from .torchrec.provider import BLSPlannerProvider
    from .torchrec.reporter import BLSPlanReporter

    __all__ += ["BLSPlanReporter", "BLSPlannerProvider"]


def __getattr__(name: str) -> Any:
    if name in _SEAMS:
        raise AttributeError(
            f"{__name__}.{name} needs torchrec 1.9 or later, which calls it. "
            "BLSShardingPlanner works with all versions: give its plan to DistributedModelParallel"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

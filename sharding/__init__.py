"""Planning of shardings from calibrated cost models (imported as ``torchrec_bls.sharding``)."""

from importlib import metadata
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from torchrec_bls._first_use import imported_at_first_use

if TYPE_CHECKING:
    from .costs.profile import Profile, load_profile
    from .costs.profiled import ProfiledCosts
    from .report.plan_report import PlanReport
    from .reuse.statistics import ReuseStatistics
    from .torchrec.estimator import calibrated_torchrec_planner
    from .torchrec.plan import load_plan, save_plan
    from .torchrec.planner import BLSShardingPlanner
    from .torchrec.provider import BLSPlannerProvider
    from .torchrec.reporter import BLSPlanReporter

__all__ = [
    "BLSShardingPlanner",
    "PlanReport",
    "Profile",
    "ProfiledCosts",
    "ReuseStatistics",
    "calibrated_torchrec_planner",
    "load_plan",
    "load_profile",
    "save_plan",
]

_PLACES = {
    "BLSShardingPlanner": ".torchrec.planner",
    "PlanReport": ".report.plan_report",
    "Profile": ".costs.profile",
    "ProfiledCosts": ".costs.profiled",
    "ReuseStatistics": ".reuse.statistics",
    "calibrated_torchrec_planner": ".torchrec.estimator",
    "load_plan": ".torchrec.plan",
    "load_profile": ".costs.profile",
    "save_plan": ".torchrec.plan",
}
_SEAMS = {"BLSPlanReporter": ".torchrec.reporter", "BLSPlannerProvider": ".torchrec.provider"}


def _has_seams() -> bool:
    """Returns whether TorchRec has seams for planners: from 1.9 on. It is not imported for that."""
    try:
        return Version(metadata.version("torchrec")).release >= (1, 9)
    except metadata.PackageNotFoundError:
        return False


if _has_seams():
    _PLACES |= _SEAMS
    __all__ += ["BLSPlanReporter", "BLSPlannerProvider"]

_at_first_use = imported_at_first_use(__name__, _PLACES)


def __getattr__(name: str) -> Any:
    if name in _SEAMS and name not in _PLACES:
        raise AttributeError(
            f"{__name__}.{name} needs torchrec 1.9 or later, which calls it. "
            "BLSShardingPlanner works with all versions: give its plan to DistributedModelParallel"
        )
    return _at_first_use(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

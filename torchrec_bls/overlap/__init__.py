"""Reduction of gradients while the backward pass goes on."""

from typing import TYPE_CHECKING

from torchrec_bls._first_use import imported_at_first_use

if TYPE_CHECKING:
    from torchrec_bls.overlap.bucket_plan import OverlapPlan, load_plan, plan

__all__ = ["OverlapPlan", "load_plan", "plan"]

__getattr__ = imported_at_first_use(__name__, dict.fromkeys(__all__, ".bucket_plan"))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

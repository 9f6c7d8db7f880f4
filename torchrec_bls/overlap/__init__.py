"""Reduction of gradients while the backward pass goes on."""

from torchrec_bls.overlap.plan import OverlapPlan, load_plan, plan

__all__ = ["OverlapPlan", "load_plan", "plan"]

"""Measuring what bounded lag does, and what it could do at best."""

from torchrec_bls.observe.ideal_steps import ideal_finish_times

__all__ = ["ideal_finish_times"]

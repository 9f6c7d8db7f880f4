"""Measurements of bounded lag, and the best that it could do."""

from torchrec_bls.observe.ideal_steps import ideal_finish_times
from torchrec_bls.observe.record_step import record_step
from torchrec_bls.observe.slowest import Slowest
from torchrec_bls.observe.straggler import (
    StragglerReport,
    gather_report,
    load_report,
    save_stats,
)

__all__ = [
    "Slowest",
    "StragglerReport",
    "gather_report",
    "ideal_finish_times",
    "load_report",
    "record_step",
    "save_stats",
]

"""Checkpoints on disk, read by rows. Other packages import these names from here."""

from torchrec_bls.checkpoints.checkpoint import Checkpoint
from torchrec_bls.checkpoints.deltas import DELTA_SUFFIX, Delta, Head, TablePart, write_part
from torchrec_bls.checkpoints.opening import open_checkpoint, why_incomplete
from torchrec_bls.checkpoints.rows import Rows

__all__ = [
    "DELTA_SUFFIX",
    "Checkpoint",
    "Delta",
    "Head",
    "Rows",
    "TablePart",
    "open_checkpoint",
    "why_incomplete",
    "write_part",
]

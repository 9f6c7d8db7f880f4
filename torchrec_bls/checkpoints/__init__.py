"""Checkpoints on disk, read by rows. Other packages import these names from here."""

from torchrec_bls.checkpoints.checkpoint import Checkpoint
from torchrec_bls.checkpoints.opening import open_checkpoint, why_incomplete
from torchrec_bls.checkpoints.rows import Rows

__all__ = ["Checkpoint", "Rows", "open_checkpoint", "why_incomplete"]

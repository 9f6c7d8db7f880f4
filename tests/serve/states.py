"""What a service serves, and what its supervisor says, made up."""

from dataclasses import replace
from typing import Any

from torchrec_bls import ServingState
from torchrec_bls.serve.status import Refreshes, Status

_STATE = ServingState(
    rank=None,
    version="step-7@0a1b2c3d",
    serial=3,
    published=1.7e9,
    age=252.0,
    trained=1.7e9 - 2.5,
    publish_seconds=1.25,
    bytes_written=3 << 20,
    bytes_reused=5 << 30,
    announced="step-7@0a1b2c3d",
    announced_serial=3,
    pending={},
    missing=(),
    owners=1,
    owners_gone=(),
    readers=(1, 2),
    readers_behind={},
    uncounted=False,
    failed_publishes=0,
    drained_for="",
    problem="",
    rows_read=(7,),
    refused_batches=0,
    replaced_ids=0,
    small_page_bytes=0,
)


def made_up_state(**facts: Any) -> ServingState:
    """Returns a state with some facts of its own."""
    return replace(_STATE, **facts)


def made_up_status(refreshes: Refreshes | None = None, ready: int = 2, **starts: int) -> Status:
    """Returns what a supervisor of two workers says."""
    return Status(refreshes or Refreshes(), 2, ready, {"start": 2, **starts})

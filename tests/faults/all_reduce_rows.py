"""Rows of the fault matrix of the backend's all-reduces."""

from dataclasses import replace

import torch

from tests.faults.faults import Kill, Mismatch, PressCtrlC, Stop
from tests.faults.plays import reduce
from tests.faults.row import KILLED, LARGE, Row

_killed = Row(
    "SIGKILL before an all-reduce",
    Kill(),
    errors=("PeerDiedError",),
    words=("rank 1 died while this rank waited for it to send",),
    end="ProcessDied",
    exit_code=KILLED,
    play=reduce,
    deadline=30.0,
    within=1.0,
)
_different = Row(
    "",
    Mismatch("items", 17),
    errors=("ProtocolError",),
    words=("All ranks have to make the same all-reduces in the same order",),
    end=("ProtocolError", "PoisonedError"),
    exit_code=1,
    play=reduce,
    deadline=30.0,
    within=1.0,
)
ALL_REDUCE = [
    *(replace(_killed, name=f"{_killed.name}, {world} ranks", world=world) for world in (2, 4)),
    replace(_killed, name=f"{_killed.name} of many segments", items=LARGE),
    replace(
        _killed,
        name="SIGSTOP longer than the deadline, in an all-reduce",
        fault=Stop(seconds=4.0),
        errors=("PeerTimeoutError",),
        words=("rank 1 did not send within 2.0", "Missing: rank 1"),
        end="PoisonedError",
        exit_code=1,
        deadline=2.0,
        within=None,
    ),
    replace(
        _killed,
        name="SIGINT in an all-reduce",
        fault=PressCtrlC(after=0.3),
        held="post",
        hold_longer=0.3,
        errors=("PoisonedError",),
        words=("because rank 1 failed: ", "KeyboardInterrupt"),
        end="KeyboardInterrupt",
        exit_code=1,
    ),
    replace(
        _different,
        name="ranks reduce different sizes",
        words=(*_different.words, "17 x float32 by SUM", "16 x float32 by SUM"),
    ),
    replace(
        _different,
        name="ranks reduce large tensors of different sizes",
        items=LARGE,
        words=(*_different.words, "17 x float32 by SUM", f"{LARGE} x float32 by SUM"),
    ),
    replace(
        _different,
        name="ranks reduce different dtypes",
        fault=Mismatch("dtype", torch.bfloat16),
        words=(*_different.words, "16 x bfloat16 by SUM", "16 x float32 by SUM"),
    ),
]

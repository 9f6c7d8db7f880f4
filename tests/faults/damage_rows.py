"""Rows of the fault matrix in which what a peer wrote is damaged."""

from dataclasses import replace

from tests.faults.faults import (
    Damage,
    Nothing,
    Replay,
)
from tests.faults.plays import pipeline
from tests.faults.row import LARGE, SETUP, Row

_damaged = Row(
    "",
    Nothing(),
    errors=("ProtocolError",),
    moment="wait",
    held="wait",
    end="PoisonedError",
    exit_code=1,
    deadline=30.0,
    within=1.0,
)
_CAUSE = "Two versions of torchrec-bls, or a write out of bounds"


def _damage(field: str, value: int, words: str, **changes: object) -> Row:
    fault, name = Damage(field, value), f"{field} {value:#x}"
    row = replace(_damaged, name=name, fault=fault, words=(words, _CAUSE))
    return replace(row, **changes)  # type: ignore[arg-type]


DAMAGE = [
    _damage("arrival", 100, "wrote sequence 99 into the slot of 3"),
    _damage("magic", 0x3F3F, "magic 16191"),
    _damage("version", 99, "wire version 99"),
    _damage("flags", 0x80, "unknown flags"),
    _damage("flags", 1, "pulled message", name="flags: pulled, which it is not"),
    _damage("source", 2, "it says it comes from rank 2"),
    _damage("parts", 99, "99 parts, at most 16"),
    replace(
        _damaged,
        name="credit 0x10",
        fault=Damage("credit", 16),
        words=("rank 1 says it read 16 of 5 messages", _CAUSE),
    ),
    replace(
        _damaged,
        name="label 0x7",
        fault=Damage("label", 7),
        words=(
            "sent what belongs to forward 0, call 7, but this rank waits for forward 0, call 0",
            "left out an exch",
        ),
    ),
    _damage("length", 1 << 20, "bytes in a slot of"),
    _damage("length", (1 << 64) - 1, "part 0 has"),
    _damage("address pid", 1, "memory of a foreign process", items=LARGE),
    _damage("address device", 0x777, "is not there any more", items=LARGE),
    _damage("address inode", 1, "is not there any more", items=LARGE),
    _damage(
        "address bytes", 100, f"{8 * LARGE} bytes in a pulled message's memory of 100", items=LARGE
    ),
    _damage("address bytes", 1 << 40, "is not there any more", items=LARGE),
    replace(
        _damaged,
        name="address fd 0x100000",
        fault=Damage("address fd", 1 << 20),
        errors=SETUP,
        words=("rank 1", "cannot open shared memory"),
        items=LARGE,
    ),
    *(
        replace(
            _damaged,
            name=name,
            fault=Damage(field, value),
            play=pipeline,
            moment="between",
            held="between",
            words=("ids from rank 1 do not fit", "All ranks must shard the same module"),
        )
        for name, field, value in [
            ("payload truncated", "third length", 0),
            ("message truncated", "parts", 0),
        ]
    ),
    replace(
        _damaged,
        name="frame of encoded rows damaged",
        fault=Damage("frame rows", 999),
        play=pipeline,
        moment="between",
        # Rank 0 finds the damage outside of the pipeline, and rank 1 waits for its ids by then.
        world=2,
        held="output",
        hold_longer=0.5,
        within=1.5,
        arguments=(("codec", "uint4"), ("direction", "embeddings")),
        words=("from rank 1, the frame of encoded rows is damaged", "A network that changes bytes"),
    ),
    *(
        replace(
            _damaged,
            name=name,
            fault=Replay(back),
            errors=("PeerTimeoutError",),
            words=("rank 1 did not send within 2.0",),
            deadline=2.0,
            within=None,
        )
        for name, back in [
            ("message of the iteration before replayed", 1),
            ("older message replayed", 2),
        ]
    ),
]

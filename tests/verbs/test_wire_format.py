"""Our channel and a rank that another program plays, which was written from docs/wire-format.md."""

import hashlib
import json
import os
import subprocess
import uuid
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.processes import run
from tests.verbs.patterns import MESSAGES, pattern
from tests.verbs.steps import gid_option
from torchrec_bls import BoundedLagChannel
from torchrec_bls.errors import BLSError

DEVICE = os.environ.get("TORCHREC_BLS_TEST_DEVICE", "")
# Debian's pyverbs is built for Debian's Python.
PYTHON = "/usr/bin/python3"
BOUND, SLOT_BYTES, DEADLINE = 1, 2048, 60.0

pytestmark = pytest.mark.skipif(
    not DEVICE, reason="needs an RDMA device, TORCHREC_BLS_TEST_DEVICE=...: make test-verbs"
)


def stand_in(rank: int, scene: str, damage: dict[str, int]) -> str:
    """Starts the other program and meets our ranks for it. Returns what became of it."""
    gid_index = gid_option(DEVICE).removeprefix("-g ")
    arguments = {
        "scene": scene,
        "damage": damage,
        "device": DEVICE,
        "gid_index": int(gid_index) if gid_index else None,
        "rank": rank,
        "world_size": dist.get_world_size(),
        "bound": BOUND,
        "slot_bytes": SLOT_BYTES,
        "deadline": DEADLINE,
    }
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.get_group_store()
    ranks = range(dist.get_world_size())
    base = "torchrec_bls/wire"
    seat = {
        "nonce": uuid.uuid4().hex,
        "session": "",
        "error": None,
        "beside": {},
        "world_size": len(ranks),
    }
    store.set(f"{base}/seat/{rank}", json.dumps(seat))
    store.add(f"{base}/changes", 1)
    nonces = [json.loads(store.get(f"{base}/seat/{peer}"))["nonce"] for peer in ranks]
    path = f"{base}/{hashlib.sha256(json.dumps(nonces).encode()).hexdigest()[:32]}"
    steps = count()

    def exchange(phase: str, record: Any) -> list[Any]:
        store.set(f"{path}/{phase}/{rank}", json.dumps(record))
        records = [json.loads(store.get(f"{path}/{phase}/{peer}")) for peer in ranks]
        assert store.compare_set(f"{path}/{next(steps)}", "", "done") == b"done"
        return records

    # All ranks must agree, so this one agrees with the first.
    terms = json.loads(store.get(f"{path}/terms/0"))
    exchange("terms", {**terms, "host": "another one"})
    with subprocess.Popen(
        [PYTHON, Path(__file__).with_name("play_peer.py"), json.dumps(arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdin is not None and program.stdout is not None
        for line in program.stdout:
            told = json.loads(line)
            if "end" in told:
                return str(told["end"])
            answer = exchange(told["phase"], told["record"])
            program.stdin.write(json.dumps(answer) + "\n")
            program.stdin.flush()
    raise RuntimeError(f"the other program ended with status {program.returncode}")


def take_part(rank: int, messages: int, fails: bool) -> None:
    """Exchanges messages over our channel, whose `with` block the user's error then ends."""
    world_size = dist.get_world_size()
    assert dist.group.WORLD is not None
    with BoundedLagChannel(
        dist.group.WORLD,
        bound=BOUND,
        slot_bytes=SLOT_BYTES,
        name="wire",
        deadline=DEADLINE,
        transport="verbs",
    ) as channel:
        for sequence in range(messages + BOUND):
            if sequence < messages:
                channel.post(
                    [
                        [torch.tensor(list(part), dtype=torch.uint8) for part in parts]
                        for parts in (pattern(rank, peer, sequence) for peer in range(world_size))
                    ]
                )
            if sequence >= BOUND:
                with channel.wait() as arrival:
                    for peer in range(world_size):
                        arrived = [bytes(part) for part in arrival.parts(peer)]
                        assert arrived == pattern(peer, rank, sequence - BOUND), (peer, sequence)
        if fails:
            raise KeyError("out of luck")


def play(rank: int, scene: str, damage: dict[str, int], messages: int, fails: bool = False) -> str:
    """Plays a rank, the last of which is the other program, and returns what became of it."""
    os.environ["TORCHREC_BLS_IB_DEVICE"] = DEVICE
    if rank == dist.get_world_size() - 1:
        return stand_in(rank, scene, damage)
    try:
        take_part(rank, messages, fails)
    except KeyError:
        return "KeyError"
    except BLSError as error:
        return f"{type(error).__name__}: {error}"
    return "closed"


@pytest.mark.parametrize("world_size", [2, 3])
def test_both_directions(world_size: int) -> None:
    ends = run(world_size, play, "exchange", {}, MESSAGES, deadline=4 * DEADLINE)
    assert ends == ["closed"] * world_size


def test_poison_of_the_other_program() -> None:
    ours, theirs = run(2, play, "poison", {}, MESSAGES, deadline=4 * DEADLINE)
    assert theirs == "poisoned the others"
    assert ours.startswith("PoisonedError") and "rank 1 failed: the peer fell over äöü" in ours


def test_a_close_of_the_other_program() -> None:
    ours, theirs = run(2, play, "close", {}, MESSAGES, deadline=4 * DEADLINE)
    assert theirs == "closed"
    assert ours.startswith("PeerClosedError") and "rank 1 closed the channel" in ours


def test_poison_of_ours() -> None:
    ours, theirs = run(2, play, "read", {}, 5, True, deadline=4 * DEADLINE)
    assert ours == "KeyError"
    assert theirs.startswith("Poisoned: rank 0 failed: channel 'wire' on rank 0"), theirs
    assert "KeyError: 'out of luck'" in theirs


@pytest.mark.parametrize(
    ("damage", "words"),
    [({"version": 99}, "wire version 99"), ({"parts": 99}, "99 parts, at most 16")],
    ids=["version", "parts"],
)
def test_a_message_against_the_format_is_refused(damage: dict[str, int], words: str) -> None:
    ours, theirs = run(2, play, "damage", damage, MESSAGES, deadline=4 * DEADLINE)
    assert words in ours, ours
    assert theirs.startswith("Poisoned: rank 0 failed") and words in theirs


def test_an_immediate_out_of_order_breaks_the_connection() -> None:
    ours, theirs = run(2, play, "damage", {"immediate": 77}, MESSAGES, deadline=4 * DEADLINE)
    assert "77" in ours and "rank 1" in ours, ours
    assert theirs.startswith("WireError: request"), theirs

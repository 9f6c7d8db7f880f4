"""Channels and sharded modules over RDMA, on the device that `make test-verbs` names."""

import os
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.channel.test_exchange import Part, exchange
from tests.distributed import models
from tests.distributed.results.test_exactness import forward, piped_outputs
from tests.processes import run
from torchrec_bls import BLSConfig, BoundedLagChannel

DEVICE = os.environ.get("TORCHREC_BLS_TEST_DEVICE", "")
# What stands for another host's, if the guest gives one.
PEER_DEVICE = os.environ.get("TORCHREC_BLS_TEST_PEER_DEVICE", DEVICE)
# Also in a guest under software emulation on a busy machine.
DEADLINE = 240.0

pytestmark = pytest.mark.skipif(
    not DEVICE, reason="needs an RDMA device, TORCHREC_BLS_TEST_DEVICE=...: make test-verbs"
)


def pretend_host(rank: int, ranks_per_host: int) -> None:
    """Makes this rank's process one of its host, which has a device of its own."""
    host = rank // ranks_per_host
    mock.patch("torchrec_bls.collective.channel.host_identity", return_value=f"host {host}").start()
    os.environ["TORCHREC_BLS_IB_DEVICE"] = (DEVICE, PEER_DEVICE)[host % 2]


def exchange_messages(rank: int, transport: str, ranks_per_host: int) -> None:
    pretend_host(rank, ranks_per_host)
    draw = random.Random(0)
    plans = [
        # Every third message does not fit its slot.
        [
            Part(
                torch.float64, draw.randint(0, 9), draw.choice([1, 7, 400 if i % 3 == 0 else 3]), 1
            )
            for _ in range(draw.randint(1, 4))
        ]
        for i in range(30)
    ]
    assert dist.group.WORLD is not None
    for bound in (0, 2):
        with BoundedLagChannel(
            dist.group.WORLD,
            bound=bound,
            slot_bytes=4096,
            deadline=DEADLINE,
            transport=transport,
        ) as channel:
            exchange(channel, plans, jitter=0.0)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_messages_over_verbs(world_size: int) -> None:
    run(world_size, exchange_messages, "verbs", 1, deadline=DEADLINE)


def test_between_hosts_auto_is_verbs() -> None:
    run(2, exchange_messages, "auto", 1, deadline=DEADLINE)


@pytest.mark.parametrize("world_size", [3, 8])
def test_shared_memory_and_verbs_in_one_channel(world_size: int) -> None:
    run(world_size, exchange_messages, "auto", 2, deadline=DEADLINE)


def compare_with_shared_memory(rank: int) -> None:
    os.environ["TORCHREC_BLS_IB_DEVICE"] = (DEVICE, PEER_DEVICE)[rank % 2]
    batches = [models.make_ids(models.EC, 10 * rank + i, samples=5 + 20 * i) for i in range(3)]
    outputs = {}
    for transport in ("shm", "verbs"):
        config = BLSConfig(transport=transport, deadline=DEADLINE)
        model = models.shard(models.EC, "mixed", models.EC.bls_sharder(config))
        outputs[transport] = [forward(model, ids) for ids in batches]
    for over_shm, over_verbs in zip(*outputs.values(), strict=True):
        models.assert_same_bits(over_verbs, over_shm)
    config = BLSConfig(transport="verbs", bound=2, deadline=DEADLINE)
    for late, over_shm in zip(
        piped_outputs(models.EC, "mixed", 1, config, batches), outputs["shm"], strict=True
    ):
        models.assert_same_bits(late, over_shm)


def test_sharded_embeddings_are_those_of_shared_memory() -> None:
    run(2, compare_with_shared_memory, deadline=DEADLINE)

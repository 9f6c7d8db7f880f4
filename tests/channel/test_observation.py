"""What a channel tells about itself: statistics, profiler ranges, warnings."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from tests.processes import run
from torchrec_bls import BoundedLagChannel, ChannelStats


def exchange_known_sizes(rank: int, bound: int, slot_bytes: int) -> ChannelStats:
    world_size = dist.get_world_size()
    with BoundedLagChannel(dist.group.WORLD, bound=bound, slot_bytes=slot_bytes) as channel:
        for _ in range(5):
            channel.post([[torch.zeros(25), torch.zeros(peer)] for peer in range(world_size)])
            channel.wait().release()
        return channel.stats()


@pytest.mark.parametrize(("world_size", "bound"), [(1, 0), (2, 0), (3, 2)])
def test_statistics_count_messages_bytes_and_memory(world_size: int, bound: int) -> None:
    for rank, stats in enumerate(run(world_size, exchange_known_sizes, bound, 5000)):
        to_peers = [100 + 4 * peer for peer in range(world_size) if peer != rank]
        assert stats.messages == 5 * (world_size - 1)
        assert stats.bytes == 5 * sum(to_peers)
        assert stats.pulled_messages == 0
        assert len(stats.wait_seconds) == world_size
        assert stats.wait_seconds[rank] == 0
        assert stats.lag_histogram == [5 * (world_size - 1)] + [0] * bound
        assert stats.slot_bytes >= 5000
        assert stats.seconds > 0
        assert stats.ring_bytes == world_size * 2 * (bound + 1) * stats.slot_bytes


def profile_an_exchange(rank: int) -> list[str]:
    with BoundedLagChannel(dist.group.WORLD, bound=2, slot_bytes=256, name="ebc ids") as channel:
        channel.post([[], []])
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            channel.post([[], []])
            channel.wait().release()
        channel.wait().release()
    return [event.name for event in profiler.events() if event.name.startswith("bls::")]


def test_profiler_ranges_name_channel_action_and_lag() -> None:
    for names in run(2, profile_an_exchange):
        assert names == [
            "bls::ebc ids post seq=1 lag=1 bound=2",
            "bls::ebc ids wait seq=0 lag=1 bound=2",
        ]


def exchange_large_messages(rank: int, slot_bytes: int) -> tuple[list[str], ChannelStats]:
    with (
        warnings.catch_warnings(record=True) as caught,
        BoundedLagChannel(dist.group.WORLD, slot_bytes=slot_bytes, name="ids") as channel,
    ):
        warnings.simplefilter("always")
        for _ in range(3):
            channel.post([[torch.zeros(10000)]] * 2)
            channel.wait().release()
        return [str(warning.message) for warning in caught], channel.stats()


def test_messages_that_do_not_fit_are_warned_about_once_with_the_size_to_set() -> None:
    for rank, (texts, stats) in enumerate(run(2, exchange_large_messages, 1024)):
        needed = stats.largest_message
        assert stats.pulled_messages == 3
        assert 40000 < needed < 40300
        assert len(texts) == 1
        assert f"channel 'ids' on rank {rank}: a message needs {needed} bytes" in texts[0]
        assert f"Set slot_bytes to at least {needed}" in texts[0]
    for texts, stats in run(2, exchange_large_messages, needed):
        assert texts == []
        assert stats.pulled_messages == 0
        assert stats.largest_message == needed

"""The counters as Prometheus scrapes them."""

import importlib
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.processes import run
from torchrec_bls import BoundedLagChannel, ChannelStats, ServingState

Key = tuple[str, frozenset[tuple[str, str]]]
Samples = dict[Key, float]


def key(name: str, **labels: str) -> Key:
    return f"torchrec_bls_{name}", frozenset(labels.items())


def scrape(registry: CollectorRegistry) -> Samples:
    """Returns what the server sees: values by name and labels."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def scrape_twice(rank: int) -> list[tuple[Samples, ChannelStats | None]]:
    from torchrec_bls.observe.prometheus import ChannelCollector

    registry = CollectorRegistry(auto_describe=True)
    channels: list[BoundedLagChannel] = []
    registry.register(ChannelCollector(lambda: channels))
    scrapes: list[tuple[Samples, ChannelStats | None]] = [(scrape(registry), None)]
    with BoundedLagChannel(dist.group.WORLD, bound=1, slot_bytes=256, name="ids") as channel:
        channels.append(channel)
        for _ in range(2):
            for _ in range(5):
                channel.post([[torch.zeros(4 * rank)]] * 3)
                channel.wait().release()
            scrapes.append((scrape(registry), channel.stats()))
    return scrapes


def test_counters_are_those_of_the_moment() -> None:
    for rank, scrapes in enumerate(run(3, scrape_twice)):
        assert scrapes[0][0] == {}
        for samples, stats in scrapes[1:]:
            me = {"channel": "ids", "rank": str(rank)}
            expected = {
                key("messages_total", **me): stats.messages,
                key("sent_bytes_total", **me): stats.bytes,
                key("pulled_messages_total", **me): 0,
                key("lag_iterations_bucket", **me, le="0.0"): stats.lag_histogram[0],
                key("lag_iterations_bucket", **me, le="+Inf"): stats.messages,
                key("lag_iterations_count", **me): stats.messages,
                key("lag_iterations_sum", **me): stats.lag_histogram[1],
            }
            for peer in {0, 1, 2} - {rank}:
                expected[key("wait_seconds_total", **me, peer=str(peer))] = stats.wait_seconds[peer]
            assert samples == expected
        assert [stats.messages for _, stats in scrapes[1:]] == [10, 20]


def scrape_channels_of_one_name(rank: int) -> None:
    from torchrec_bls.observe.prometheus import ChannelCollector

    with (
        BoundedLagChannel(dist.group.WORLD, slot_bytes=256, name="ids") as first,
        BoundedLagChannel(dist.group.WORLD, slot_bytes=256, name="ids") as second,
        pytest.raises(ValueError, match=r"several channels are named \['ids'\]"),
    ):
        list(ChannelCollector(lambda: [first, second]).collect())


@pytest.mark.smoke
def test_channels_of_one_name_are_refused() -> None:
    run(1, scrape_channels_of_one_name)


def state(**changed: Any) -> ServingState:
    """Returns the state of a reader, with changes."""
    reader = ServingState(
        rank=None,
        version="d",
        serial=4,
        published=None,
        age=None,
        trained=None,
        publish_seconds=None,
        bytes_written=None,
        bytes_reused=None,
        announced="d",
        announced_serial=4,
        pending={},
        missing=(),
        owners=1,
        owners_gone=(),
        readers=(4712,),
        readers_behind={},
        uncounted=True,
        failed_publishes=0,
        drained_for="",
        problem="",
        rows_read=(9,),
        refused_batches=0,
        replaced_ids=0,
        small_page_bytes=0,
    )
    return replace(reader, **changed)


def test_tables_without_their_owner_are_named() -> None:
    from torchrec_bls.observe.prometheus import ServingCollector

    states: list[ServingState | None] = [None]
    registry = CollectorRegistry(auto_describe=True)
    registry.register(ServingCollector(lambda: states[-1]))
    assert scrape(registry) == {}
    states.append(
        state(
            rank=1,
            version="c",
            serial=3,
            published=1.7e9 + 0.5,
            age=3.0,
            trained=1.7e9 - 2.5,
            publish_seconds=12.5,
            bytes_written=100,
            bytes_reused=2400,
            announced="d",
            announced_serial=4,
            pending={1: "e"},
            missing=(0,),
            owners=2,
            owners_gone=(0,),
            readers=(4711, 4712),
            readers_behind={4711: 2},
            uncounted=False,
            failed_publishes=7,
            drained_for="e",
            problem="no memory",
            rows_read=(70, 80),
            refused_batches=5,
            replaced_ids=6,
            small_page_bytes=8192,
        )
    )
    assert scrape(registry) == {
        key("version_info", process="1", version="c"): 1,
        key("version_serial", process="1"): 3,
        key("version_published_timestamp_seconds", process="1"): 1.7e9 + 0.5,
        key("version_trained_timestamp_seconds", process="1"): 1.7e9 - 2.5,
        key("publish_seconds", process="1"): 12.5,
        key("version_written_bytes", process="1"): 100,
        key("version_reused_bytes", process="1"): 2400,
        key("failed_publishes_total", process="1"): 7,
        key("version_serial_announced", process="1"): 4,
        key("owner_missing", process="1", owner="0"): 1,
        key("owner_missing", process="1", owner="1"): 0,
        key("owner_gone", process="1", owner="0"): 1,
        key("owner_gone", process="1", owner="1"): 0,
        key("readers", process="1"): 2,
        key("readers_behind", process="1"): 1,
        key("reader_uncounted", process="1"): 0,
        key("drained", process="1"): 1,
        key("version_small_page_bytes", process="1"): 8192,
        key("rows_read_total", process="1", owner="0"): 70,
        key("rows_read_total", process="1", owner="1"): 80,
        key("refused_batches_total", process="1"): 5,
        key("replaced_ids_total", process="1"): 6,
    }
    states.append(state())
    assert scrape(registry) == {
        key("version_info", process="reader", version="d"): 1,
        key("version_serial", process="reader"): 4,
        key("version_serial_announced", process="reader"): 4,
        key("owner_missing", process="reader", owner="0"): 0,
        key("owner_gone", process="reader", owner="0"): 0,
        key("readers", process="reader"): 1,
        key("readers_behind", process="reader"): 0,
        key("reader_uncounted", process="reader"): 1,
        key("drained", process="reader"): 0,
        key("version_small_page_bytes", process="reader"): 0,
        key("failed_publishes_total", process="reader"): 0,
        key("rows_read_total", process="reader", owner="0"): 9,
        key("refused_batches_total", process="reader"): 0,
        key("replaced_ids_total", process="reader"): 0,
    }


def test_a_missing_client_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torchrec_bls.observe.prometheus"
    absent: Any = None
    monkeypatch.setitem(sys.modules, "prometheus_client", absent)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError, match=r"pip install 'torchrec-bls\[prometheus\]'"):
        importlib.import_module(name)

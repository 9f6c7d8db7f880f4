"""How groups of the backend `bls` are made, configured and ended."""

import subprocess
import sys
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.processes import run
from torchrec_bls import BLSOptions, BoundedLagChannel, VerbsConfig
from torchrec_bls.collective.backend import process_group


def exchange(group: dist.ProcessGroup | None = None) -> None:
    rank = dist.get_rank(group)
    received = torch.empty(dist.get_world_size(group))
    dist.all_to_all_single(received, torch.full_like(received, float(rank)), group=group)
    assert received.tolist() == list(range(len(received)))


def make_again(rank: int, name: str, options: BLSOptions | None) -> tuple[Any, ...]:
    """Ends the default group and makes it again, twice."""
    store, size = dist.group.WORLD.get_group_store(), dist.get_world_size()
    dist.barrier()  # no rank may go while another one still connects to it
    for generation in range(2):
        dist.destroy_process_group()
        dist.init_process_group(
            name,
            store=dist.PrefixStore(f"generation {generation}", store),
            rank=rank,
            world_size=size,
            pg_options=options,
        )
        group = dist.group.WORLD
        assert group.channel is None  # until the first all-to-all
        exchange()
        exchange()
        channel = group.channel
        assert channel.stats().messages == 2
    return group.name(), channel.bound, channel.stats().slot_bytes, channel.name


@pytest.mark.parametrize("name", ["bls", "cpu:bls"])
def test_the_default_group(name: str) -> None:
    options = BLSOptions(bound=3, slot_bytes=1024)
    for found in run(2, make_again, name, options):
        assert found == ("bls", 3, 1024, "all-to-all of group 0")


def test_the_environment_says_what_options_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    default = BLSOptions()
    monkeypatch.delenv("TORCHREC_BLS_BACKEND", raising=False)
    assert BLSOptions.from_environment() == default
    monkeypatch.setenv(
        "TORCHREC_BLS_BACKEND", " bound=2, deadline=0.5 ,slot_bytes = 512,transport=tcp,"
    )
    assert BLSOptions.from_environment() == BLSOptions(
        bound=2, transport="tcp", slot_bytes=512, deadline=0.5
    )
    monkeypatch.setenv("TORCHREC_BLS_BACKEND", "bound=1")
    assert BLSOptions.from_environment() == BLSOptions(bound=1)


@pytest.mark.parametrize("text", ["bound", "bound=two", "lag=2", "bound=1;deadline=2"])
def test_what_the_environment_cannot_say(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHREC_BLS_BACKEND", text)
    with pytest.raises(ValueError, match=r"TORCHREC_BLS_BACKEND is '.*none of bound=NUMBER"):
        BLSOptions.from_environment()


def choose_a_transport(rank: int) -> list[dict[str, Any]]:
    verbs = VerbsConfig(port=1)
    made: list[dict[str, Any]] = []

    def make(*args: Any, **options: Any) -> BoundedLagChannel:
        made.append({name: options[name] for name in ("transport", "slot_bytes", "verbs")})
        return BoundedLagChannel(*args, **options)

    with mock.patch.object(process_group, "BoundedLagChannel", make):
        exchange(dist.new_group(backend="bls"))
        options = BLSOptions(transport="tcp", verbs=verbs)
        exchange(dist.new_group(backend="bls", pg_options=options))
    assert made[1].pop("verbs") is verbs
    return made


def test_the_transport_is_an_option() -> None:
    expected = [
        {"transport": "auto", "slot_bytes": 65536, "verbs": None},
        {"transport": "tcp", "slot_bytes": 65536},
    ]
    assert run(2, choose_a_transport) == [expected] * 2


def use_the_environment(rank: int) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHREC_BLS_BACKEND", "bound=2")
        groups = [
            dist.new_group(backend="bls"),
            dist.new_group(backend="bls", pg_options=BLSOptions(bound=1)),
        ]
    for group in groups:
        exchange(group)
    with pytest.raises(TypeError, match="pg_options of backend 'bls' are a"):
        dist.new_group(backend="bls", pg_options={"bound": 1})
    return [group.channel.bound for group in groups]


def test_options_come_before_the_environment() -> None:
    assert run(2, use_the_environment) == [[2, 1]] * 2


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"bound": -1}, "bound is -1"),
        ({"deadline": 0.0}, "deadline is 0.0"),
        ({"slot_bytes": 8}, "slot_bytes is 8"),
        ({"transport": "rdma"}, "transport is 'rdma', but has to be one of auto"),
    ],
)
def test_options_that_no_channel_can_have(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        BLSOptions(**values)


def test_importing_the_package_registers_the_backend_and_leaves_defaults() -> None:
    code = """
import torch.distributed as dist
before = dist.Backend.default_device_backend_map["cpu"]
import torchrec_bls
assert dist.Backend.default_device_backend_map["cpu"] == before
assert dist.Backend.backend_capability["bls"] == ["cpu"]
assert not dist.is_initialized()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)
    process_group.register()
    process_group.register()
    assert dist.Backend.backend_list.count("bls") == 1


def use_two_groups_at_once(rank: int) -> None:
    groups = [dist.new_group(backend="bls") for _ in range(2)]
    outputs = [torch.empty(2) for _ in groups]
    works = [
        dist.all_to_all_single(output, torch.full((2,), 10.0 * i + rank), group=g, async_op=True)
        for i, (output, g) in enumerate(zip(outputs, groups, strict=True))
    ]
    for work in reversed(works):
        work.wait()
    assert [output.tolist() for output in outputs] == [[0, 1], [10, 11]]


def test_groups_are_separate() -> None:
    run(2, use_two_groups_at_once)


def use_first_from_two_threads(rank: int) -> int:
    group: Any = dist.new_group(backend="bls")
    made: list[object] = []
    make = group._make_channel

    def make_slowly() -> object:
        made.append(None)
        time.sleep(0.3)  # in which the other thread comes
        return make()

    with mock.patch.object(group, "_make_channel", make_slowly):
        threads = [threading.Thread(target=exchange, args=(group,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return len(made)


def test_a_group_that_two_threads_use_first_has_one_channel() -> None:
    assert run(2, use_first_from_two_threads) == [1, 1]

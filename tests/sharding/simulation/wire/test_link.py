"""What messages take on links, counted message by message, and rates as people write them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchrec_bls.sharding.simulation.wire.link import Link, read_link


def test_only_what_leaves_a_host_passes_its_link() -> None:
    link = Link.of_hosts(2.0, ranks=4, per_host=2)
    sent = np.full((4, 4), 10.0)
    # Each rank sends 10 bytes to both ranks of the other host.
    assert link.transfer_us(sent).tolist() == [10.0] * 4


def test_ranks_of_one_host_alone_talk_over_its_link() -> None:
    link = Link.of_hosts(2.0, ranks=4, per_host=4)
    assert link.transfer_us(np.full((4, 4), 10.0)).tolist() == [15.0] * 4


def test_a_host_that_receives_more_than_it_sends_takes_longer() -> None:
    link = Link.of_hosts(1.0, ranks=4, per_host=2)
    sent = np.zeros((4, 4))
    sent[0, 2] = 100.0
    # Host 0 sends 100 from rank 0; host 1 receives them, which counts as half on each rank.
    assert link.transfer_us(sent).tolist() == [100.0, 0.0, 50.0, 50.0]


@given(st.integers(1, 3), st.integers(1, 3), st.booleans(), st.integers(0, 2**32))
def test_a_host_takes_the_longer_of_its_directions(
    hosts: int, per_host: int, within: bool, seed: int
) -> None:
    ranks = hosts * per_host
    sent = np.random.default_rng(seed).integers(0, 100, (ranks, ranks)).astype(float)
    link = Link(4.0, tuple(rank // per_host for rank in range(ranks)), within)
    transfer = link.transfer_us(sent)
    for host in range(hosts):
        out, back = 0.0, 0.0
        for sender in range(ranks):
            for receiver in range(ranks):
                same = sender // per_host == receiver // per_host
                if sender == receiver or (same and not within):
                    continue
                out += sent[sender, receiver] * (sender // per_host == host)
                back += sent[sender, receiver] * (receiver // per_host == host)
        own = transfer[host * per_host : (host + 1) * per_host]
        assert own.sum() == pytest.approx(max(out, back) / 4.0)


@pytest.mark.parametrize(
    ("text", "bytes_per_us"),
    [("1gbit", 125.0), ("2.5Gbit", 312.5), ("100mbit", 12.5), (" 800kbit ", 0.1)],
)
def test_rates(text: str, bytes_per_us: float) -> None:
    assert read_link(text) == (pytest.approx(bytes_per_us), 0.0)


def test_bursts_in_the_notation_of_tc() -> None:
    assert read_link("1gbit burst 256kb") == (125.0, 256 * 1024)
    assert read_link(" 1Gbit  burst 1.5MB") == (125.0, 1.5 * 2**20)
    assert read_link("8mbit burst 1600b") == (1.0, 1600.0)


@pytest.mark.parametrize(
    "text",
    [
        *("", "gbit", "1", "1gb", "fast", "0gbit", "-1gbit", "nangbit", "infgbit", "1 000gbit"),
        *("1gbit 256kb", "1gbit burst", "1gbit burst 256", "1gbit burst 0kb", "1gbit burst -1kb"),
    ],
)
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match=f"link '{text}' is no positive rate: give one with its"):
        read_link(text)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_links_that_nothing_passes(rate: float) -> None:
    with pytest.raises(ValueError, match="must be a positive number"):
        Link(rate, (0, 0))


@pytest.mark.parametrize("burst", [-1.0, float("nan"), float("inf")])
def test_bursts_that_no_link_has(burst: float) -> None:
    with pytest.raises(ValueError, match=f"burst of {burst} bytes: must not be negative"):
        Link(1.0, (0, 0), burst_bytes=burst)

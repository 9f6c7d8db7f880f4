"""Whatever another rank writes into the store, setting up a channel ends in a documented error."""

import hashlib
import json
import os
from contextlib import suppress
from importlib import metadata
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from torchrec_bls import BoundedLagChannel, _native
from torchrec_bls.collective.transport.rendezvous import host_identity
from torchrec_bls.errors import BLSError, RendezvousError

SLOT_BYTES = 1024
RING = _native.ShmTransport(0, 2, 2, SLOT_BYTES).address
TERMS = {
    "package": metadata.version("torchrec-bls"),
    "wire_version": _native.WIRE_VERSION,
    "world_size": 2,
    "bound": 0,
    "slot_bytes": SLOT_BYTES,
    "transport": "auto",
    "host": host_identity(),
}
SET = hashlib.sha256(b'["ours", "theirs"]').hexdigest()[:32]


@pytest.fixture(scope="module")
def transport() -> None:
    """In the place of the one for the other files: these tests are about shared memory."""


class TwoRanks:
    """A process group whose rank 1 has written its records beforehand."""

    group_name = "two ranks"

    def __init__(self, records: dict[str, bytes], seat: dict[str, Any] | None = None) -> None:
        self._store = dist.HashStore()
        base = "torchrec_bls/hostile"
        seat = {"session": "", "beside": {}, "world_size": 2} | (seat or {"error": None})
        self._store.set(f"{base}/seat/1", json.dumps({"nonce": "theirs"} | seat))
        for phase, text in records.items():
            self._store.set(f"{base}/{SET}/{phase}/1", text)

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def get_group_store(self) -> dist.Store:
        return self._store


def create(terms: bytes, memory: bytes = b"") -> None:
    records = {"terms": terms, "memory": memory, "connected": b"{}"}
    join(TwoRanks(records))


def join(group: TwoRanks) -> None:
    ours = mock.Mock(hex="ours")
    with mock.patch("torchrec_bls.collective.transport.rendezvous.uuid.uuid4", lambda: ours):
        BoundedLagChannel(group, slot_bytes=SLOT_BYTES, name="hostile", deadline=0.1).close()  # type: ignore[arg-type]


def refused(terms: bytes, memory: bytes = b"") -> str:
    with pytest.raises(BLSError) as caught:
        create(terms, memory)
    return str(caught.value)


def encoded(record: Any) -> bytes:
    return json.dumps(record).encode()


numbers = st.integers() | st.sampled_from([2**31, 2**32, 2**63, 2**64, -1, 0])
scalars = st.none() | st.booleans() | numbers | st.floats() | st.text()
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10
)
# Nobody else's process: this must not open what belongs to others.
processes = st.just(os.getpid()) | st.integers(max_value=0) | st.integers(min_value=1 << 22)
addresses = st.tuples(
    processes | values.filter(lambda value: not isinstance(value, (int, float))),
    numbers | values,
    numbers | st.just(RING[2]) | values,
    numbers | values,
    numbers | st.just(RING[4]) | values,
)


@given(st.binary() | values.map(encoded))
def test_anything_in_place_of_the_terms_is_refused(terms: bytes) -> None:
    assert "rank 1" in refused(terms)


@given(st.sampled_from(sorted(TERMS)), values)
def test_terms_with_one_field_changed_are_refused(field: str, value: Any) -> None:
    terms = TERMS | {field: value}
    if encoded(terms) != encoded(TERMS):
        assert field in refused(encoded(terms))


@given(st.sampled_from(sorted(TERMS)))
def test_terms_without_a_field_are_refused(field: str) -> None:
    terms = {name: value for name, value in TERMS.items() if name != field}
    assert "another form" in refused(encoded(terms))


@given(st.binary() | values.map(encoded))
def test_anything_in_place_of_the_memory_is_refused(memory: bytes) -> None:
    assert "rank 1" in refused(encoded(TERMS), memory)


@given(addresses)
def test_any_address_is_refused_or_is_memory_of_the_agreed_size(address: Any) -> None:
    with suppress(BLSError):
        create(encoded(TERMS), encoded({"address": address}))


def test_a_record_nested_beyond_the_parser_is_refused() -> None:
    assert "another form" in refused(b"[" * 100_000)


def test_an_error_is_quoted_and_anything_else_refused() -> None:
    with pytest.raises(RendezvousError, match="rank 1 could not set it up: no space"):
        join(TwoRanks({}, {"error": "no space"}))
    for error in (7, ["a", "b"]):
        with pytest.raises(RendezvousError, match=r"rank 1 announced .*Install one"):
            join(TwoRanks({}, {"error": error}))

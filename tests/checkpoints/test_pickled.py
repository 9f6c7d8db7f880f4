"""Pickled data: what it says, and nothing of it is called."""

import collections
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_bls.checkpoints import open_checkpoint
from torchrec_bls.checkpoints.pickled import Made, Named, unpickled

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()
)
KEYS = st.one_of(st.none(), st.integers(), st.text())
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(KEYS, inner)
    ),
)


@given(value=VALUES, protocol=st.integers(0, pickle.HIGHEST_PROTOCOL), again=st.booleans())
def test_plain_data_is_what_pickle_loads(value: Any, protocol: int, again: bool) -> None:
    value = [value, value] if again else value  # by the memo
    data = pickle.dumps(value, protocol)
    loaded, read = pickle.loads(data), unpickled(data, "it")
    if protocol < 3:  # bytes are made by a call there
        loaded, read = repr(loaded), repr(read)
        if "Made" in read:
            return
    assert read == loaded


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_is_called(protocol: int, tmp_path: Path) -> None:
    made = unpickled(pickle.dumps([Hostile(tmp_path / "made")], protocol), "it")[0]
    assert isinstance(made, Made) and made.by.endswith(".mkdir")
    assert made.arguments == (str(tmp_path / "made"),)
    assert not (tmp_path / "made").exists()


def test_a_hostile_object_beside_tensors_is_no_tensor(tmp_path: Path) -> None:
    content = {"t": torch.ones(2), "hostile": Hostile(tmp_path / "made")}
    torch.save(content, tmp_path / "model.pt")
    with open_checkpoint(tmp_path / "model.pt") as checkpoint:
        assert list(checkpoint) == ["t"]
    assert not (tmp_path / "made").exists()


def test_sizes_dtypes_and_ordered_dictionaries() -> None:
    value = collections.OrderedDict(size=torch.Size([2, 3]), dtype=torch.float16)
    read = unpickled(pickle.dumps(value), "it")
    assert read["size"] == (2, 3)
    assert isinstance(read["dtype"], Named) and read["dtype"].name == "torch.float16"


def test_keys_of_any_depth() -> None:
    # As a key of Python's it would be hashed, to its depth in C.
    data = b"\x80\x02}(" + b")" + b"\x85" * 1_000_000 + b"K\x01u."
    assert len(unpickled(data, "it")) == 1


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"}", b"hello", b"K\x01", b"R.", b"(.", b"\x85.", b"h\x05.", b"K\x01a."),
        *(b"K\x01K\x01s.", b"}K\x01K\x01(u.", b"}(K\x01u.", b"\x97."),
        b"\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",
    ],
)
def test_damaged_data(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"it is no pickled data, or damaged \(.*write"):
        unpickled(data, "it")


def test_more_data_than_names_and_numbers_take() -> None:
    with pytest.raises(ValueError, match="67,108,865 bytes of names and numbers"):
        unpickled(bytes((64 << 20) + 1), "it")

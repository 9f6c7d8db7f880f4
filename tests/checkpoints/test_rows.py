"""Rows that are read are those that the libraries load, in each format."""

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torchrec.tensor_types import UInt4Tensor

from tests.checkpoints.files import WRITERS, write_distributed
from torchrec_bls.checkpoints import Checkpoint, open_checkpoint
from torchrec_bls.checkpoints.files import Files
from torchrec_bls.checkpoints.rows import Block, StoredRows, Strided

DTYPES = [
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.int8),
    *(torch.int64, torch.bool, torch.uint16, torch.complex64, torch.float8_e4m3fn),
]


def random_tensor(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Bytes of all kinds, NaN and infinities among them."""
    count = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed))
    data = data % 2 if dtype is torch.bool else data
    return data.to(torch.uint8).view(dtype).reshape(tuple(shape))


def check_equal(read: torch.Tensor, expected: torch.Tensor) -> None:
    assert read.dtype == expected.dtype and read.shape == expected.shape
    assert read.is_contiguous() and read.untyped_storage().nbytes() == read.nbytes
    assert bytes_of(read) == bytes_of(expected)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.smoke
@pytest.mark.parametrize("kind", WRITERS)
@settings(max_examples=15)
@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=4),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=4, max_size=4),
    data=st.data(),
)
def test_any_rows_of_any_tensor(
    kind: str, shapes: list[list[int]], dtypes: list[torch.dtype], data: st.DataObject
) -> None:
    tensors = {
        f"t.{at}": random_tensor(shape, dtype, at)
        for at, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=False))
    }
    with tempfile.TemporaryDirectory() as folder:
        path = WRITERS[kind](Path(folder), tensors)
        with open_checkpoint(path) as checkpoint:
            assert set(checkpoint) == set(tensors) and len(checkpoint) == len(tensors)
            for name, tensor in tensors.items():
                rows = checkpoint[name]
                assert rows.shape == tuple(tensor.shape) and rows.dtype == tensor.dtype
                assert name in rows.where and str(path) in rows.where
                check_equal(rows.whole(), tensor)
                if tensor.dim():
                    first = data.draw(st.integers(0, len(tensor)))
                    end = data.draw(st.integers(first, len(tensor)))
                    check_equal(rows.read(first, end), tensor[first:end])


@pytest.mark.parametrize("kind", WRITERS)
def test_what_the_libraries_load(kind: str, tmp_path: Path) -> None:
    tensors = {"a": random_tensor([50, 12], torch.float16), "b": random_tensor([3], torch.int64)}
    path = WRITERS[kind](tmp_path, tensors)
    if kind == "distributed":
        loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        dcp.load(loaded, checkpoint_id=path, no_dist=True)
    else:
        loaded = torch.load(path) if kind == "torch file" else load_file(path)
    with open_checkpoint(path) as checkpoint:
        for name, tensor in loaded.items():
            check_equal(checkpoint[name].whole(), tensor)


@pytest.mark.parametrize("key", ["state_dict", "model"])
@pytest.mark.parametrize("kind", ["distributed", "torch file"])
def test_a_state_dict_in_another_dictionary(kind: str, key: str, tmp_path: Path) -> None:
    tables = {"embedding_bags.t.weight": random_tensor([4, 2], torch.float32)}
    moments = {"moment": torch.ones(2)}
    path = WRITERS[kind](tmp_path, {key: tables, "optimizer": moments})  # type: ignore[dict-item]
    with open_checkpoint(path) as checkpoint:
        assert list(checkpoint) == list(tables)
        check_equal(checkpoint["embedding_bags.t.weight"].whole(), next(iter(tables.values())))


def test_views_parameters_and_packed_numbers_of_a_torch_file(tmp_path: Path) -> None:
    base, packed = random_tensor([9, 8], torch.float32), random_tensor([5, 6], torch.uint8)
    tensors = {
        "rows": base[2:6],
        "columns": base[:, 3:5],
        "parameter": torch.nn.Parameter(torch.randn(4, 3)),
        "packed": UInt4Tensor(packed),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }
    attributed = torch.randn(3, 2)
    attributed.note = "kept by pickle"  # type: ignore[attr-defined]
    torch.save({**tensors, "attributed": attributed, "epoch": 3}, tmp_path / "a.pt")
    with open_checkpoint(tmp_path) as checkpoint:
        assert "epoch" not in checkpoint
        assert checkpoint["rows"].tensor_type == "torch.Tensor"
        assert checkpoint["packed"].tensor_type == "torchrec.tensor_types.UInt4Tensor"
        check_equal(checkpoint["packed"].read(1, 4), packed[1:4])
        check_equal(checkpoint["attributed"].whole(), attributed)
        for name in ("rows", "columns", "parameter", "channels last"):
            check_equal(checkpoint[name].whole(), tensors[name].contiguous())
            check_equal(checkpoint[name].read(1, 2), tensors[name][1:2].contiguous())


def test_several_files_of_safetensors(tmp_path: Path) -> None:
    a, b = random_tensor([4, 2], torch.float32), random_tensor([5], torch.float16)
    save_file({"a": a}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": b}, tmp_path / "model-00002-of-00002.safetensors", {"format": "pt"})
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = {"metadata": {"total_size": 42}, "weight_map": names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_checkpoint(tmp_path) as checkpoint:
        check_equal(checkpoint["a"].read(1, 3), a[1:3])
        check_equal(checkpoint["b"].whole(), b)


def test_a_folder_that_a_link_leads_to(tmp_path: Path) -> None:
    tensor = random_tensor([4, 2], torch.float32)
    write_distributed(tmp_path, {"a": tensor})
    (tmp_path / "latest").symlink_to("distributed")
    with open_checkpoint(tmp_path / "latest") as checkpoint:
        check_equal(checkpoint["a"].whole(), tensor)


def test_identities_tell_checkpoints_apart(tmp_path: Path) -> None:
    def identity(path: Path) -> str:
        with open_checkpoint(path) as checkpoint:
            assert isinstance(checkpoint, Checkpoint)
            return checkpoint.identity

    path = write_distributed(tmp_path, {"a": torch.ones(4, 2)})
    first = identity(path)
    assert identity(path) == first
    shard = path / "__0_0.distcp"
    data = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(data)
    assert identity(path) != first


@given(data=st.data(), shape=st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_blocks_are_the_whole_tensor_each_value_once(data: st.DataObject, shape: list[int]) -> None:
    size = tuple(shape)
    blocks = [((0,) * len(size), size)]
    for _ in range(data.draw(st.integers(0, 6))):  # cut a block in two
        offsets, sizes = blocks.pop(data.draw(st.integers(0, len(blocks) - 1)))
        axis = data.draw(st.integers(0, len(size) - 1))
        at = data.draw(st.integers(0, sizes[axis]))
        for begin, length in ((0, at), (at, sizes[axis] - at)):
            of = list(offsets), list(sizes)
            of[0][axis] += begin
            of[1][axis] = length
            blocks.append((tuple(of[0]), tuple(of[1])))

    def rows(of: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> StoredRows:
        files = Files(Path("/"))

        def find() -> Strided:
            raise AssertionError("nothing is read")

        return StoredRows("it", size, torch.float32, [Block(*each, find) for each in of], files)

    rows(blocks)
    at = data.draw(st.sampled_from([i for i, (_, n) in enumerate(blocks) if math.prod(n)]))
    with pytest.raises(ValueError, match="not whole"):
        rows(blocks[:at] + blocks[at + 1 :])
    with pytest.raises(ValueError, match="two blocks"):
        rows([*blocks, blocks[at]])

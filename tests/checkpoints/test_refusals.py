"""What is no checkpoint, or a damaged one, is refused. The text names the file and the cure."""

import json
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import MetadataIndex

from tests.checkpoints.files import write_distributed, write_safetensors, write_torch_file
from torchrec_bls.checkpoints import open_checkpoint, why_incomplete

TABLE = torch.arange(12.0).reshape(4, 3)


def check_refused(path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=text) as refused:
        open_checkpoint(path)
    assert str(path) in str(refused.value)
    assert why_incomplete(path) == str(refused.value)


def test_no_checkpoint(tmp_path: Path) -> None:
    check_refused(tmp_path, "no checkpoint, or one not yet complete: give the path of a folder")
    check_refused(tmp_path / "missing.pt", r"can't be read \(No such file.*give the path")
    check_refused(tmp_path / "missing", "no checkpoint")
    (tmp_path / "text.txt").write_text("hello")
    check_refused(tmp_path / "text.txt", "no checkpoint")
    os.mkfifo(tmp_path / "pipe.pt")  # nobody will ever write to it
    check_refused(tmp_path / "pipe.pt", "is no regular file")
    (tmp_path / "loop.pt").symlink_to("loop.pt")
    check_refused(tmp_path / "loop.pt", "can't be read")


def test_several_kinds_in_a_folder(tmp_path: Path) -> None:
    write_safetensors(tmp_path, {"t": TABLE})
    write_torch_file(tmp_path, {"t": TABLE})
    check_refused(tmp_path, "has .safetensors and .pt or .pth or .bin: give the path")


def test_several_files_of_one_kind(tmp_path: Path) -> None:
    for name in ("a", "b"):
        torch.save({"t": TABLE}, tmp_path / f"{name}.pt")
    check_refused(tmp_path, r"\(2 files\): give the path")
    (tmp_path / "a.pt").unlink()
    (tmp_path / "b.pt").unlink()
    for name in ("a", "b"):
        save_file({"t": TABLE}, tmp_path / f"{name}.safetensors")
    check_refused(tmp_path, "has 2 .safetensors files and 0 files that end in")


# torch.distributed.checkpoint


def distributed(folder: Path, change: Any) -> Path:
    """Writes a checkpoint whose metadata are changed by a function."""
    path = write_distributed(folder, {"t": TABLE, "u": TABLE})
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


def place_of(metadata: Any, name: str = "t") -> Any:
    return metadata.storage_data[MetadataIndex(name, [0, 0])]


def set_to(name: str, value: Any) -> Any:
    return lambda metadata: setattr(place_of(metadata), name, value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (set_to("relative_path", "__1_0.distcp"), r"__1_0.distcp can't be read \(No such file"),
        (set_to("relative_path", "../t"), r"names the file ../t, not in"),
        (set_to("relative_path", "/etc/passwd"), r"names the file /etc/passwd, not in"),
        (set_to("offset", 10**9), r"but 't' ends at byte 10000.*cut off, or still written"),
        (set_to("offset", -1), r"_StorageInfo is damaged \(Expected `int` >= 0"),
        (set_to("length", 2**70), r"_StorageInfo is damaged"),
        (set_to("length", "9"), r"_StorageInfo is damaged"),
        (set_to("transform_descriptors", ["zstd"]), r"'t' transformed by \['zstd'\]: save without"),
        (
            lambda m: place_of(m).__dict__.update(place_of(m, "u").__dict__),
            "has two blocks in byte",
        ),
        (lambda m: m.storage_data.clear(), r"'t' of .* has no bytes for its block at \(0, 0\)"),
        (lambda m: setattr(m, "storage_data", None), "Metadata is damaged"),
        (
            lambda m: setattr(m.state_dict_metadata["t"], "size", torch.Size([5, 3])),
            "'t' of .* is not whole",
        ),
        (
            lambda m: setattr(m.state_dict_metadata["t"], "size", torch.Size([4])),
            "block of other dimensions",
        ),
        (
            lambda m: setattr(m.state_dict_metadata["t"], "size", torch.Size([3, 3])),
            r"has the shape \[3, 3\], but a block at \[0, 0\] of \[4, 3\]",
        ),
        (
            lambda m: m.state_dict_metadata["t"].chunks.append(
                m.state_dict_metadata["t"].chunks[0]
            ),
            r"has two blocks at \[0, 0\]",
        ),
    ],
)
def test_damaged_metadata(change: Any, text: str, tmp_path: Path) -> None:
    check_refused(distributed(tmp_path, change), text)


def test_metadata_of_something_else(tmp_path: Path) -> None:
    path = write_distributed(tmp_path, {"t": TABLE})
    (path / ".metadata").write_bytes(pickle.dumps({"t": TABLE.shape}))
    check_refused(path, "has a dict where a Metadata belongs")
    (path / ".metadata").write_bytes(b"{}")
    check_refused(path, "is no pickled data, or damaged")
    (path / ".metadata").unlink()
    check_refused(path, "not yet complete")


def test_blocks_of_another_shape_or_dtype_or_none(tmp_path: Path) -> None:
    path = write_distributed(tmp_path, {"t": TABLE})
    other = write_distributed(tmp_path / "other", {"t": TABLE.half(), "u": TABLE})
    good = (path / "__0_0.distcp").read_bytes()
    (path / "__0_0.distcp").write_bytes((other / "__0_0.distcp").read_bytes()[: len(good)])
    for data, text in (
        ((other / "__0_0.distcp").read_bytes().ljust(len(good), b"\0")[: len(good)], ""),
        (bytes(len(good)), r"the block of 't' of .* at byte 0 of .*distcp is no zip file"),
    ):
        (path / "__0_0.distcp").write_bytes(data)
        with open_checkpoint(path) as checkpoint, pytest.raises(ValueError, match=text):
            checkpoint["t"].read(0, 4)

    def as_half(metadata: Any) -> None:
        metadata.state_dict_metadata["t"].properties.dtype = torch.float16

    changed = distributed(tmp_path / "changed", as_half)
    with open_checkpoint(changed) as checkpoint:
        text = r"has \[4, 3\] values of torch.float32 for 't'.*, but \[4, 3\] of torch.float16"
        with pytest.raises(ValueError, match=text):
            checkpoint["t"].read(0, 4)


# torch.save


def test_files_that_torch_save_has_not_written_like_this(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({"t": TABLE}, path, _use_new_zipfile_serialization=False)
    check_refused(path, "torch.save's old format must be saved again with torch.save")
    path.write_bytes(b"")
    check_refused(path, "is no zip file")
    with zipfile.ZipFile(path, "w") as written:
        written.writestr("model/version", "3")
    check_refused(path, "has 0 records 'data.pkl'")
    torch.save(TABLE, path)
    check_refused(path, "has a torch._utils._rebuild_tensor_v2, but must have a state dict")
    torch.save({"state_dict": {}, "model": {}}, path)
    check_refused(path, "has both 'state_dict' and 'model'")
    torch.save(5, path)
    check_refused(path, "has a int, but must have a state dict")


def rewritten(path: Path, compression: int, **changed: bytes) -> None:
    """Writes a zip file again, with other compression and records."""
    with zipfile.ZipFile(path) as old:
        records = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, data in records.items():
            new.writestr(name, changed.get(name.rpartition("/")[2], data))


def test_compressed_and_foreign_records(tmp_path: Path) -> None:
    path = write_torch_file(tmp_path, {"t": TABLE})
    rewritten(path, zipfile.ZIP_STORED)
    with open_checkpoint(path) as checkpoint:
        assert torch.equal(checkpoint["t"].whole(), TABLE)
    rewritten(path, zipfile.ZIP_DEFLATED)
    check_refused(path, "record 'byteorder' of .* is compressed: save it again")
    write_torch_file(tmp_path, {"t": TABLE})
    rewritten(path, zipfile.ZIP_STORED, byteorder=b"big")
    check_refused(path, "is from a big-endian machine")


def test_tensors_that_are_not_rows_of_a_file(tmp_path: Path) -> None:
    tensors = {
        "transposed": torch.ones(3, 4).t(),
        "expanded": torch.ones(1, 3).expand(5, 3),
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(3, device="meta"),
        "quantized": torch.quantize_per_tensor(TABLE, 0.1, 0, torch.quint8),
    }
    path = write_torch_file(tmp_path, {"t": TABLE, **tensors})
    with open_checkpoint(path) as checkpoint:
        assert set(checkpoint) >= {"t", *tensors}
        for name in tensors:
            with pytest.raises(ValueError, match=rf"'{name}' of .*model.pt .*: save ") as refused:
                checkpoint[name]
            assert str(path) in str(refused.value)
        assert torch.equal(checkpoint["t"].whole(), TABLE)
        with pytest.raises(KeyError):
            checkpoint["missing"]


def test_values_that_are_missing(tmp_path: Path) -> None:
    path = write_torch_file(tmp_path, {"t": TABLE})
    rewritten(path, zipfile.ZIP_STORED, **{"0": TABLE.numpy().tobytes()[:-4]})
    text = r"'t' of .* ends behind the values"
    with open_checkpoint(path) as checkpoint, pytest.raises(ValueError, match=text):
        checkpoint["t"]


@pytest.mark.parametrize(("first", "end"), [(-1, 2), (3, 2), (0, 5), (5, 5)])
def test_rows_that_are_not_there(first: int, end: int, tmp_path: Path) -> None:
    with open_checkpoint(write_torch_file(tmp_path, {"t": TABLE, "s": TABLE[0, 0]})) as checkpoint:
        text = re.escape(f"has the shape [4, 3], and so no rows {first} to {end}")
        with pytest.raises(ValueError, match=text):
            checkpoint["t"].read(first, end)
        with pytest.raises(ValueError, match=re.escape("has the shape [], and so no rows 0 to 1")):
            checkpoint["s"].read(0, 1)


# safetensors


def safetensors(path: Path, header: Any, values: bytes, length: int | None = None) -> Path:
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(data) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + data + values)
    return path


def f32(shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ({"t": f32([4], 0, 16), "u": f32([4], 8, 24)}, r"'u' has the bytes \[8, 24\], but must"),
        ({"t": f32([4], 0, 16), "u": f32([1], 20, 24)}, r"must begin at 16, where the one before"),
        ({"t": f32([2], 16, 24), "u": f32([4], 16, 0)}, r"'u' has the bytes \[16, 0\]"),
        ({"t": f32([4], -8, 8)}, "expected int >= 0"),
        ({"t": f32([2**70], 0, 24)}, "is no JSON|expected int"),
        ({"t": f32([2**62, 0], 0, 24)}, "but .* need 0"),
        ({"t": f32([5], 0, 24)}, r"has 24 bytes, but \[5\] values of torch.float32 need 20"),
        ({"t": f32([5], 0, 20)}, "its tensors end at byte .*: it is cut off, or still written"),
        ({"t": f32([7], 0, 28)}, "its tensors end at byte .*: it is cut off, or still written"),
        ({"t": {"dtype": "F32", "shape": [6]}}, "'data_offsets' is missing"),
        ({"t": f32([6], 0, 24) | {"more": 1}}, "'more' is unknown"),
        ({"t": 5}, "'t': expected object"),
        (b"[1, 2]", "expected object"),
        (b'{"t": ', "is no JSON, or cut off"),
    ],
)
def test_damaged_headers(header: Any, text: str, tmp_path: Path) -> None:
    check_refused(safetensors(tmp_path / "a.safetensors", header, bytes(24)), text)


@pytest.mark.parametrize("length", [0, 1, 2**63, 2**64 - 1, 100_000_001, 1000])
def test_lengths_of_headers(length: int, tmp_path: Path) -> None:
    path = safetensors(tmp_path / "a.safetensors", {}, b"", length)
    check_refused(path, f"says that its header has {length} .*cut off, or still written")


def test_an_unknown_dtype_costs_its_tensor_alone(tmp_path: Path) -> None:
    odd = {"dtype": "F4", "shape": [16], "data_offsets": [8, 16]}
    header = {"t": f32([2], 0, 8), "odd": odd, "__metadata__": {"format": "pt"}}
    path = safetensors(tmp_path / "a.safetensors", header, bytes(16))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint["t"].whole().tolist() == [0, 0]
        with pytest.raises(
            ValueError, match=r"'odd' of .*a.safetensors has the unknown dtype 'F4'"
        ):
            checkpoint["odd"]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ({"t": "b.safetensors"}, r"b.safetensors can't be read \(No such file"),
        ({"t": "../a.safetensors"}, "names the file '../a.safetensors', which is not beside it"),
        ({"missing": "a.safetensors"}, "a.safetensors has no 'missing', but"),
        ({"t": 5}, "expected str"),
    ],
)
def test_damaged_indexes(names: Any, text: str, tmp_path: Path) -> None:
    save_file({"t": TABLE}, tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    check_refused(tmp_path, text)

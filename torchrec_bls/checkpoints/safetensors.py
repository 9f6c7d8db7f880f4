"""Files of safetensors: the length of a header, the header in JSON, and the values of all tensors.

https://github.com/huggingface/safetensors, "Format".
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import torch

from torchrec_bls.checkpoints.checkpoint import Checkpoint
from torchrec_bls.checkpoints.files import Files
from torchrec_bls.checkpoints.rows import DTYPES, Block, Rows, StoredRows, Strided, bytes_of
from torchrec_bls.records import Format, Record, Whole, decode

#: How the name of an index ends, which says which file has which tensor.
INDEX = ".safetensors.index.json"
_LENGTH_BYTES = 8
# Of the first tensor, for those who map files.
_ALIGNMENT = 8
# Of a header; safetensors' own bound.
_MOST_BYTES = 100_000_000
#: Name in a header of what is no tensor: text by name.
METADATA = "__metadata__"
_CURE = "write the file again with safetensors"
_DTYPES = {
    **{"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16},
    **{"I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F32": torch.float32, "F64": torch.float64, "C64": torch.complex64},
    **{f"U{bits}": DTYPES[f"uint{bits}"] for bits in (16, 32, 64)},
    **{"F8_E4M3": DTYPES["float8_e4m3fn"], "F8_E5M2": DTYPES["float8_e5m2"]},
}
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Tensor(Record):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[Whole, Whole]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


_INDEX = Format(_Index, "write the checkpoint again")


class SafetensorsFile(NamedTuple):
    """What a file says of itself.

    Attributes:
        entries: its tensors, or for those that can't be read the reason.
        metadata: JSON of what else its writer has said; None: nothing.
    """

    entries: dict[str, Rows | str]
    metadata: msgspec.Raw | None


def open_safetensors(path: Path, found: list[Path], indexes: list[Path]) -> Checkpoint:
    """Opens a checkpoint of safetensors.

    Args:
        path: path of the checkpoint: the file, or its folder.
        found: its files.
        indexes: indexes among them.

    Raises:
        ValueError: a file is something else, incomplete, or not there.
    """
    if len(indexes) > 1 or (len(found) > 1 and not indexes):
        raise ValueError(
            f"{path} has {len(found)} .safetensors files and {len(indexes)} files that end in "
            f"{INDEX}: give the path of one file, or a folder whose index says which are its files"
        )
    files = Files(path if path.is_dir() else path.parent)
    entries: dict[str, Rows | str] = {}
    if not indexes:
        return Checkpoint(path, read_file(found[0], path, files).entries, files)
    index = indexes[0]
    size = files.add(index)
    if size > _MOST_BYTES:
        raise ValueError(f"{index} has {size:,} bytes, and so is no index: {_CURE}")
    weight_map = _INDEX.decode(files.read(index, 0, size, "the index"), str(index)).weight_map
    of_files: dict[str, dict[str, Rows | str]] = {}
    for name, file in weight_map.items():
        if Path(file).name != file:
            raise ValueError(f"{index} names the file {file!r}, which is not beside it: {_CURE}")
        if file not in of_files:
            of_files[file] = read_file(index.parent / file, path, files).entries
        if name not in of_files[file]:
            raise ValueError(f"{index.parent / file} has no '{name}', but {index} says so: {_CURE}")
        entries[name] = of_files[file][name]
    return Checkpoint(path, entries, files)


def read_file(file: Path, path: Path, files: Files) -> SafetensorsFile:
    """Reads what a file says of itself.

    Args:
        file: the file.
        path: path of the checkpoint.
        files: files of the checkpoint, to which it is added.

    Raises:
        ValueError: the file is something else, incomplete, or not there.
    """
    header, metadata, begin, size = _header(file, files)
    end = 0
    for name, tensor in sorted(header.items(), key=lambda item: item[1].data_offsets):
        if tensor.data_offsets[0] != end or tensor.data_offsets[1] < end:
            raise ValueError(
                f"{file}: '{name}' has the bytes {list(tensor.data_offsets)}, but must begin at "
                f"{end}, where the one before it ends: {_CURE}"
            )
        end = tensor.data_offsets[1]
    if begin + end != size:
        raise ValueError(
            f"{file} has {size} bytes, but its tensors end at byte {begin + end}: it is cut off, "
            f"or still written; {_CURE}"
        )
    entries: dict[str, Rows | str] = {
        name: _rows(tensor, f"'{name}' of {path}", file, begin, files)
        for name, tensor in header.items()
    }
    return SafetensorsFile(entries, metadata)


def _header(file: Path, files: Files) -> tuple[dict[str, _Tensor], msgspec.Raw | None, int, int]:
    """Returns the tensors of the header, its metadata, the first byte behind it, and the size of
    the file."""
    size = files.add(file)
    length = 0
    if size > _LENGTH_BYTES:
        length = int.from_bytes(files.read(file, 0, _LENGTH_BYTES, "the length"), "little")
    if not 1 < length <= min(_MOST_BYTES, size - _LENGTH_BYTES):
        raise ValueError(
            f"{file} has {size} bytes, and says that its header has {length} (of {_MOST_BYTES} at "
            f"most): it is no safetensors file, cut off, or still written; {_CURE}"
        )
    data = files.read(file, _LENGTH_BYTES, length, "the header")
    raw = decode(data, dict[str, msgspec.Raw], str(file), _CURE)
    metadata = raw.pop(METADATA, None)
    header = {name: decode(each, _Tensor, f"{file}: '{name}'", _CURE) for name, each in raw.items()}
    return header, metadata, _LENGTH_BYTES + length, size


def _rows(tensor: _Tensor, where: str, file: Path, begin: int, files: Files) -> Rows | str:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        return f"{where} has the unknown dtype {tensor.dtype!r}: save float32 or float16"
    first, end = tensor.data_offsets
    if bytes_of(tensor.shape, dtype) != end - first:
        raise ValueError(
            f"{where} has {end - first} bytes, but {list(tensor.shape)} values of {dtype} need "
            f"{bytes_of(tensor.shape, dtype)}: {_CURE}"
        )
    values = Strided.by_rows(file, begin + first, dtype, tensor.shape)
    block = Block((0,) * len(tensor.shape), tensor.shape, lambda: values)
    return StoredRows(where, tensor.shape, dtype, [block], files)


def write_file(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Writes a new file, and returns when the disk has it.

    Args:
        path: its path, where there is no file yet.
        tensors: tensors by name, of any shapes.
        metadata: text by name.

    Raises:
        ValueError: the format has no such dtype.
        OSError: the file can't be written. A part of it may be there.
    """
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header: dict[str, object] = {METADATA: dict(metadata)}
    values, end = [], 0
    for name, tensor in tensors.items():
        if tensor.dtype not in names:
            raise ValueError(f"'{name}' is of {tensor.dtype}, which no safetensors file can have")
        value = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        values.append(value)
        place = [end, end + len(value)]
        header[name] = {
            **{"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        }
        end = place[1]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for value in values:
            file.write(memoryview(value.numpy()))  # type: ignore[arg-type]
        file.flush()
        os.fsync(file.fileno())

"""Folders of torch.distributed.checkpoint (DCP).

`.metadata` is a pickled `torch.distributed.checkpoint.metadata.Metadata`. It says which blocks each
tensor has, and which bytes of which file are a block. Such bytes are what torch.save writes of a
tensor.
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from torchrec_bls.checkpoints.checkpoint import Checkpoint
from torchrec_bls.checkpoints.files import Files
from torchrec_bls.checkpoints.pickled import MOST_BYTES, Made, Named, unpickled
from torchrec_bls.checkpoints.rows import DTYPES, Block, Rows, StoredRows, Strided
from torchrec_bls.checkpoints.saved_tensors import Saved
from torchrec_bls.records import Whole

#: The file that is written last, once all others are there.
METADATA = ".metadata"
_CURE = "write the checkpoint again with torch.distributed.checkpoint"
_CLASSES = "torch.distributed.checkpoint."
_T = TypeVar("_T")
_Sizes = tuple[Annotated[int, msgspec.Meta(ge=0, le=2**62)], ...]


class _Metadata(msgspec.Struct):
    state_dict_metadata: dict[str, Any]
    storage_data: dict[Any, Any]
    planner_data: Any = None


class _Tensor(msgspec.Struct):
    properties: Any
    size: _Sizes
    chunks: list[Any]


class _Chunk(msgspec.Struct):
    offsets: _Sizes
    sizes: _Sizes


class _Key(msgspec.Struct):
    fqn: str
    offset: _Sizes | None = None


class _Place(msgspec.Struct):
    relative_path: str
    offset: Whole
    length: Whole
    transform_descriptors: Any = None


class _Part(NamedTuple):
    """Bytes of a file."""

    begin: int
    end: int
    file: Path


def open_distributed(path: Path) -> Checkpoint:
    """Opens a folder of torch.distributed.checkpoint.

    Raises:
        ValueError: `.metadata` is something else, or a file that it names is missing or too short.
    """
    files = Files(path)
    file = path / METADATA
    size = files.add(file)
    data = files.read(file, 0, min(size, MOST_BYTES + 1), "the metadata")
    metadata = _of(unpickled(data, str(file)), "Metadata", _Metadata, file)
    parts = _parts(metadata, path, files)
    entries: dict[str, Rows | str] = {}
    for saved_name, name in _names(metadata, file):
        found = metadata.state_dict_metadata[saved_name]
        if isinstance(found, Made) and found.by.endswith(".TensorStorageMetadata"):
            tensor = _of(found, "TensorStorageMetadata", _Tensor, file)
            if name in entries:
                raise ValueError(f"{file} has '{name}' twice: {_CURE}")
            entries[name] = _rows(tensor, saved_name, f"'{name}' of {path}", parts, files)
    return Checkpoint(path, entries, files)


def _parts(metadata: _Metadata, path: Path, files: Files) -> dict[tuple[str, _Sizes], _Part]:
    """Returns the part of each block by name and offsets, all of them in files that are there."""
    parts: dict[tuple[str, _Sizes], _Part] = {}
    for key, value in metadata.storage_data.items():
        index = _of(key, "MetadataIndex", _Key, path / METADATA)
        place = _of(value, "_StorageInfo", _Place, path / METADATA)
        if place.transform_descriptors:
            raise ValueError(
                f"{path} has '{index.fqn}' transformed by {place.transform_descriptors}: save "
                "without extensions of the writer"
            )
        relative = Path(place.relative_path)
        if relative.is_absolute() or ".." in relative.parts:
            raise ValueError(f"{path / METADATA} names the file {relative}, not in {path}: {_CURE}")
        part = _Part(place.offset, place.offset + place.length, path / relative)
        size = files.add(part.file)
        if part.end > size:
            raise ValueError(
                f"{part.file} has {size} bytes, but '{index.fqn}' ends at byte {part.end} of it: "
                f"it is cut off, or still written; {_CURE}"
            )
        if (index.fqn, index.offset or ()) in parts:
            raise ValueError(
                f"{path / METADATA} has two blocks of '{index.fqn}' at one place: {_CURE}"
            )
        parts[index.fqn, index.offset or ()] = part
    by_file = sorted(parts.values(), key=lambda part: (part.file, part.begin))
    for one, other in itertools.pairwise(by_file):
        if one.file == other.file and one.end > other.begin:
            raise ValueError(
                f"{path / METADATA} has two blocks in byte {other.begin} of {one.file}: {_CURE}"
            )
    return parts


def _names(metadata: _Metadata, file: Path) -> Iterator[tuple[str, str]]:
    """Yields the names of entries of the state dict: in `.metadata`, and in the state dict.

    A state dict may have been saved in another dictionary, as its "state_dict" or "model". Names
    begin with that key then.
    """
    saved: Mapping[str, Any] = {}
    if isinstance(metadata.planner_data, dict):
        saved = {
            name: path
            for name, path in metadata.planner_data.items()
            if isinstance(path, tuple) and len(path) > 1
        }
    nested = defaultdict(list)
    for name in metadata.state_dict_metadata:
        path = saved.get(name, ())
        if path and path[0] in ("state_dict", "model"):
            nested[path[0]].append((name, ".".join(map(str, path[1:]))))
    if len(nested) > 1:
        raise ValueError(f"{file} has both 'state_dict' and 'model': save one of them alone")
    yield from next(iter(nested.values()), ((name, name) for name in metadata.state_dict_metadata))


def _rows(
    tensor: _Tensor,
    name: str,
    where: str,
    parts: Mapping[tuple[str, _Sizes], _Part],
    files: Files,
) -> Rows | str:
    state = tensor.properties.state if isinstance(tensor.properties, Made) else None
    named = state[0] if isinstance(state, tuple) and state else None
    dtype = None
    if isinstance(named, Named):
        dtype = DTYPES.get(named.name.removeprefix("torch."))
    if dtype is None:
        return f"{where} has an unknown dtype: save float32 or float16"
    blocks = []
    for each in tensor.chunks:
        chunk = _of(each, "ChunkStorageMetadata", _Chunk, files.root / METADATA)
        part = parts.get((name, chunk.offsets))
        if part is None:
            raise ValueError(f"{where} has no bytes for its block at {chunk.offsets}: {_CURE}")
        if len(chunk.offsets) != len(tensor.size) or len(chunk.sizes) != len(tensor.size):
            raise ValueError(f"{where} has a block of other dimensions: {_CURE}")
        find = functools.cache(functools.partial(_values, part, where, files))
        blocks.append(Block(chunk.offsets, chunk.sizes, find))
    return StoredRows(where, tensor.size, dtype, blocks, files)


def _values(part: _Part, where: str, files: Files) -> Strided:
    """Returns where the values of a block are."""
    block = f"the block of {where} at byte {part.begin} of {part.file}"
    saved = Saved(files, part.file, part.begin, part.end - part.begin, block)
    tensor = saved.tensor(saved.content, where)
    if tensor is None or tensor.tensor_type != "torch.Tensor":
        raise ValueError(f"{block} is no plain tensor: {_CURE}")
    return tensor.values


def _of(made: Any, name: str, form: type[_T], file: Path) -> _T:
    """Returns the state of an object of DCP's class `name` as `form`."""
    by = made.by if isinstance(made, Made) else type(made).__name__
    if not by.startswith(_CLASSES) or not by.endswith("." + name):
        raise ValueError(f"{file} has a {by} where a {name} belongs: {_CURE}")
    try:
        return msgspec.convert(made.state, form)
    except msgspec.ValidationError as error:
        raise ValueError(f"{file}: a {name} is damaged ({error}): {_CURE}") from error

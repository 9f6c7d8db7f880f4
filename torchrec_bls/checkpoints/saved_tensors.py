"""Tensors as torch.save writes them: their form in pickled data, their values in records."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import torch

from torchrec_bls.checkpoints.files import Files
from torchrec_bls.checkpoints.pickled import MOST_BYTES, Made, Named, Stored, unpickled
from torchrec_bls.checkpoints.rows import DTYPES, Strided, bytes_of
from torchrec_bls.checkpoints.zip_records import ZipRecords
from torchrec_bls.records import Whole

_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_STORAGES = {
    **{"Float": torch.float32, "Double": torch.float64, "Half": torch.float16},
    **{"BFloat16": torch.bfloat16, "Byte": torch.uint8, "Char": torch.int8, "Bool": torch.bool},
    **{"Short": torch.int16, "Int": torch.int32, "Long": torch.int64},
    **{"ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128},
}
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_TENSORS = ("torch._tensor.Tensor", "torch.Tensor", "torch.nn.parameter.Parameter")
_PACKED = ("torchrec.tensor_types.UInt4Tensor", "torchrec.tensor_types.UInt2Tensor")


class _Form(msgspec.Struct):
    """Arguments of torch's function that makes a tensor, but for those that hold no values."""

    storage: Any
    offset: Whole
    shape: tuple[_Size, ...]
    strides: tuple[_Size, ...]


class SavedTensor(NamedTuple):
    """A tensor in pickled data.

    Attributes:
        values: where its values are.
        tensor_type: see Rows.
    """

    values: Strided
    tensor_type: str


class Saved:
    """What one call of torch.save has written.

    Args:
        files: files of the checkpoint.
        path: file that has it.
        begin: its first byte there.
        size: its bytes.
        where: what it is, for errors.

    Attributes:
        content: the object that was saved, as `unpickled` returns it.

    Raises:
        ValueError: the file has something else there.
    """

    def __init__(self, files: Files, path: Path, begin: int, size: int, where: str) -> None:
        self._path = path
        self._where = where
        self._records = ZipRecords(files, path, begin, size, where)
        if "byteorder" in self._records and self._records.read("byteorder", 16) != b"little":
            raise ValueError(
                f"{where} is from a big-endian machine: save it on a little-endian one"
            )
        self.content = unpickled(self._records.read("data.pkl", MOST_BYTES), where)

    def tensor(self, made: Any, name: str) -> SavedTensor | None:
        """Returns where the values of a tensor are.

        Args:
            made: the tensor, in `content`.
            name: its name, for errors.

        Returns:
            None if `made` is no tensor.

        Raises:
            ValueError: a tensor whose values can't be read by rows.
        """
        made, tensor_type = _plain(made)
        if not isinstance(made, Made):
            return None
        kind = made.by.rpartition(".")[2]
        if made.by in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"):
            return SavedTensor(self._strided(made, name), tensor_type)
        if "Tensor" in kind or "tensor" in kind:
            cure = "save plain dense CPU tensors"
            if kind in ("ShardedTensor", "DTensor", "ShardedTensorBase"):
                cure = "save with torch.distributed.checkpoint, since this has one rank's part"
            raise ValueError(f"'{name}' of {self._where} is a {made.by}: {cure}")
        return None

    def _strided(self, made: Made, name: str) -> Strided:
        where = f"'{name}' of {self._where}"
        try:
            form = msgspec.convert(
                dict(zip(_Form.__struct_fields__, made.arguments, strict=False)), _Form
            )
        except msgspec.ValidationError as error:
            raise ValueError(f"{where} is damaged ({error}): write the checkpoint again") from error
        key, dtype = _storage(form.storage, made.arguments, where)
        record = self._records.find(f"data/{key}")
        if len(form.shape) != len(form.strides):
            raise ValueError(
                f"{where} has other dimensions than strides: write the checkpoint again"
            )
        span = 0
        if math.prod(form.shape):
            steps = zip(form.shape, form.strides, strict=True)
            span = 1 + sum((length - 1) * stride for length, stride in steps)
        if (form.offset + span) * dtype.itemsize > record.size:
            raise ValueError(
                f"{where} ends behind the values that were saved for it: write the checkpoint again"
            )
        if bytes_of(form.shape, dtype) > record.size or not _is_by_rows(form):
            raise ValueError(
                f"{where} is not stored row by row (strides {list(form.strides)}, sizes "
                f"{list(form.shape)}): save tensor.contiguous()"
            )
        begin = record.begin + form.offset * dtype.itemsize
        return Strided(self._path, begin, dtype, form.shape, form.strides)


def state_dict_in(content: Any, where: str) -> Mapping[Any, Any]:
    """Returns the state dict in what was saved: all of it, or its value of "state_dict" or "model".

    Raises:
        ValueError: there is none, or there are two.
    """
    if not isinstance(content, dict):
        kind = content.by if isinstance(content, Made) else type(content).__name__
        raise ValueError(f"{where} has a {kind}, but must have a state dict: save state_dict()")
    nested = [key for key in ("state_dict", "model") if isinstance(content.get(key), dict)]
    if len(nested) > 1:
        raise ValueError(f"{where} has both 'state_dict' and 'model': save one of them alone")
    inner: Mapping[Any, Any] = content[nested[0]] if nested else content
    return inner


def _plain(made: Any) -> tuple[Any, str]:
    """Returns the tensor in a Parameter, a tensor with attributes, or in one of packed numbers; and
    the type of the tensor."""
    tensor_type = "torch.Tensor"
    while isinstance(made, Made) and made.arguments:
        if made.by in _PARAMETERS:
            made = made.arguments[0]
        elif made.by == "torch._tensor._rebuild_from_type_v2" and len(made.arguments) == 4:
            by, of, arguments, state = made.arguments
            name = of.name if isinstance(of, Named) else ""
            if name in _PACKED and isinstance(state, dict):
                made, tensor_type = state.get("elem"), name
            elif name in _TENSORS and isinstance(by, Named) and isinstance(arguments, tuple):
                made = Made(by.name, arguments)
            else:
                return Made(name or "tensor of an unknown class"), tensor_type
        else:
            break
    return made, tensor_type


def _storage(stored: Any, arguments: tuple[Any, ...], where: str) -> tuple[str, torch.dtype]:
    """Returns the key of a tensor's storage, and its dtype."""
    key = stored.key if isinstance(stored, Stored) else None
    if isinstance(key, tuple) and len(key) == 5 and key[0] == "storage":
        _, of, name, _, _ = key
        kind = of.name.rpartition(".")[2] if isinstance(of, Named) else ""
        dtype = _STORAGES.get(kind.removesuffix("Storage"))
        if kind == "UntypedStorage" and len(arguments) > 6 and isinstance(arguments[6], Named):
            dtype = DTYPES.get(arguments[6].name.removeprefix("torch."))
        if isinstance(name, str) and dtype is not None:
            return name, dtype
    raise ValueError(f"{where} has values of an unknown dtype: save float32 or float16")


def _is_by_rows(form: _Form) -> bool:
    """Returns whether each row begins behind the one before."""
    if len(form.shape) < 2 or not math.prod(form.shape):
        return True
    row = 1 + sum((n - 1) * step for n, step in zip(form.shape[1:], form.strides[1:], strict=True))
    return form.shape[0] == 1 or form.strides[0] >= row

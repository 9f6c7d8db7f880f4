"""The weights of a module after its tables have moved to shared memory."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import increment_version

from torchrec_bls import _native

# Bytes of a cache line; no two tables share one.
_ALIGNMENT = 64


class _Place(NamedTuple):
    """A tensor, and the part of memory that it shows. Offset and stride are in items."""

    tensor: torch.Tensor
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


class LiveWeights:
    """The tensors by which a module, its optimizer and its state dict see the shards of this rank.

    After the move they are a private view of this rank's tables. Reading them takes no memory. If
    this process writes to them, only it sees the change. The sealed pieces never
    change. The places of the tensors are known from the beginning: what becomes of
    the tensors later, by `half()` for instance, breaks no switch.

    Args:
        storages: one tensor for each piece of memory with shards, covering the whole piece.
        views: other tensors that may lie in this memory; those that do not are left alone.
        wrappers: tensors that count the writes through them alone, to tensors among `views`.

    Attributes:
        offsets: places of `storages` in the memory that is shown, in bytes.
        bytes: bytes up to the end of the last one.
        behind: why the tensors show an older generation than lookups read; empty if they do not.
    """

    def __init__(
        self,
        storages: Sequence[torch.Tensor],
        views: Iterable[torch.Tensor],
        wrappers: Iterable[torch.Tensor] = (),
    ) -> None:
        self._storages = [storage for storage in storages if storage.nbytes]
        self.offsets: list[int] = []
        self.behind = ""
        at = 0
        # Of each memory: the storages in it, and their offsets.
        self._memory: dict[int, list[tuple[torch.Tensor, int]]] = {}
        for storage in self._storages:
            self.offsets.append(at)
            self._memory.setdefault(_memory_of(storage), []).append((storage, at))
            at += -(-storage.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.bytes = at
        self._places = self._places_of(views)
        shown = [place.tensor for place in self._places]
        self._counters = self._counted = _one_of_each_counter([*shown, *wrappers])
        self._versions = self._sum_of_versions()
        self._published: int | None = None

    def storages(self) -> list[tuple[torch.Tensor, int]]:
        """Returns each storage and its offset, in bytes."""
        return list(zip(self._storages, self.offsets, strict=True))

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Returns the byte of the memory that is shown where a tensor in one of the storages
        begins. After the first move no tensor lies in them any more."""
        if tensor.nbytes == 0:
            return 0
        for storage, offset in self._memory.get(_memory_of(tensor), []):
            distance = tensor.data_ptr() - storage.data_ptr()
            if 0 <= distance <= storage.nbytes:
                return offset + distance
        raise ValueError("the tensor is in none of the storages")

    def move_to(self, view: _native.TableWindow) -> None:
        """Makes all tensors show other tables, and frees their former memory.

        It may be called again if it was interrupted. Until it returns, no other thread may use the
        tensors.

        Args:
            view: private view of the tables in this process.
        """
        self._memory = {}
        if self._places:  # else there may be no memory
            pages = torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
            with torch.no_grad():
                for place in self._places:
                    _show(place, pages)
        self._counted = self._counters
        self._versions, self._published, self.behind = self._sum_of_versions(), None, ""

    def let_go(self) -> None:
        """Makes all tensors show no rows, and frees their former memory; see `move_to`. Nothing can
        be written to them until they show tables again, so that nothing counts as written."""
        self._memory = {}
        with torch.no_grad():
            for place in self._places:
                _show_nothing(place)
        self._counted = []
        self._versions, self._published, self.behind = 0, None, ""

    def stay_behind(self, reason: str) -> None:
        """Takes the place of a move that is not possible. All writes so far count as published.

        Args:
            reason: reason for it.
        """
        self._versions, self._published, self.behind = self._sum_of_versions(), None, reason

    @property
    def written(self) -> bool:
        """Returns whether the weights were written to since the move, as far as torch counts. It
        does not count writes through `.data` or another library's view."""
        return self._sum_of_versions() != self._versions

    @property
    def would_lose_writes(self) -> bool:
        """Returns whether a move would lose writes: they are in no announced generation."""
        return self._sum_of_versions() not in (self._versions, self._published)

    def writes(self) -> int:
        """Returns what `published` takes once the weights of this moment are announced."""
        return self._sum_of_versions()

    def published(self, writes: int) -> None:
        """Notes that all writes up to a moment are part of an announced generation, or replaced by
        it. Lookups see it only once it serves."""
        self._published = writes

    def strangers(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
        """Returns the names of tensors that do not show these weights any more: they were replaced,
        or converted to another dtype.

        Args:
            tensors: the module's parameters by name.
        """
        memory = {_memory_of(storage) for storage in self._storages}
        dtypes = {place.dtype for place in self._places}
        return [
            name
            for name, tensor in tensors
            if tensor.nbytes and (tensor.dtype not in dtypes or _memory_of(tensor) not in memory)
        ]

    def _sum_of_versions(self) -> int:
        return sum([tensor._version for tensor in self._counted])

    def _places_of(self, views: Iterable[torch.Tensor]) -> list[_Place]:
        tensors = {id(tensor): tensor for tensor in self._storages}
        for view in (*self._storages, *views):
            if view.nbytes and _memory_of(view) in self._memory:
                tensors[id(view)] = view
                # The tensor that it was cut from would keep the former memory.
                if view._base is not None:
                    tensors[id(view._base)] = view._base
        return [
            _Place(
                tensor,
                self.offset_of(tensor) // tensor.element_size(),
                tensor.dtype,
                tensor.shape,
                tensor.stride(),
            )
            for tensor in tensors.values()
        ]


def _show(place: _Place, pages: torch.UntypedStorage) -> None:
    tensor, offset, dtype, shape, stride = place
    if tensor.dtype == dtype:
        tensor.set_(pages, offset, shape, stride)
    else:  # it was converted, and is put back
        tensor.data = torch.empty(0, dtype=dtype).set_(pages, offset, shape, stride)


def _show_nothing(place: _Place) -> None:
    shape = torch.Size((0, *place.shape[1:]))
    empty = torch.empty(shape, dtype=place.dtype)
    _show(_Place(place.tensor, 0, place.dtype, shape, empty.stride()), empty.untyped_storage())


def _one_of_each_counter(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns one of the tensors for each version counter. Views of one kernel's tables share one,
    and every forward asks."""
    found = []
    while tensors:
        before = [tensor._version for tensor in tensors]
        found.append(tensors[0])
        increment_version(tensors[0])
        tensors = [
            tensor
            for tensor, version in zip(tensors, before, strict=True)
            if tensor._version == version
        ]
    return found


def _memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()

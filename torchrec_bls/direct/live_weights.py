"""The weights of a module after its tables have moved to shared memory."""

from collections.abc import Iterable, Sequence

import torch

from torchrec_bls import _native

# Bytes of a cache line; no two tables share one.
_ALIGNMENT = 64


class LiveWeights:
    """The tensors by which a module, its optimizer and its state dict see the shards of this rank.

    After the move they are a private view of this rank's segment. Reading them takes no memory. If
    this process writes to them, only it sees the change. The segment, which lookups read, never
    changes.

    Args:
        storages: one tensor for each piece of memory with shards, covering the whole piece.
        views: other tensors that may lie in this memory; those that do not are left alone.

    Attributes:
        offsets: places of `storages` in a segment, in bytes.
        segment_bytes: bytes that a segment needs.
    """

    def __init__(self, storages: Sequence[torch.Tensor], views: Iterable[torch.Tensor]) -> None:
        self._storages = [storage for storage in storages if storage.nbytes]
        self.offsets: list[int] = []
        at = _native.FIRST_TABLE_OFFSET
        for storage in self._storages:
            self.offsets.append(at)
            at += -(-storage.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.segment_bytes = at
        self._tensors = self._in_storages(views)
        self._version = self._versions()

    def storages(self) -> list[tuple[torch.Tensor, int]]:
        """Returns each storage and its offset in a segment, in bytes."""
        return list(zip(self._storages, self.offsets, strict=True))

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Returns the byte of a segment where a tensor in one of the storages begins."""
        if tensor.nbytes == 0:
            return int(_native.FIRST_TABLE_OFFSET)
        for storage, offset in zip(self._storages, self.offsets, strict=True):
            distance = tensor.data_ptr() - storage.data_ptr()
            if 0 <= distance <= storage.nbytes and _same_memory(tensor, storage):
                return offset + distance
        raise ValueError("the tensor is in none of the storages")

    def move_to(self, view: _native.PrivatePages) -> None:
        """Makes all tensors show the tables of a segment, and frees their former memory.

        Until this returns, no other thread may use the module.

        Args:
            view: private view of the segment in this process.
        """
        pages = torch.frombuffer(view, dtype=torch.uint8)
        places = [(tensor, self.offset_of(tensor)) for tensor in self._tensors]
        with torch.no_grad():
            for tensor, offset in places:
                shown = pages[offset : offset + tensor.nbytes].view(tensor.dtype)
                tensor.set_(
                    shown.untyped_storage(),
                    shown.storage_offset(),
                    tensor.shape,
                    tensor.stride(),
                )
        self._version = self._versions()

    @property
    def written(self) -> bool:
        """Returns whether the weights were written to since the move, as far as torch counts. It
        does not count writes through `.data` or another library's view."""
        return self._versions() != self._version

    def accept(self) -> None:
        """Treats all writes so far as published."""
        self._version = self._versions()

    def _versions(self) -> int:
        return sum([tensor._version for tensor in self._tensors])

    def _in_storages(self, views: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        tensors = {id(tensor): tensor for tensor in self._storages}
        for view in (*self._storages, *views):
            if view.nbytes and any(_same_memory(view, storage) for storage in self._storages):
                tensors[id(view)] = view
                # The tensor that it was cut from would keep the former memory.
                if view._base is not None:
                    tensors[id(view._base)] = view._base
        return list(tensors.values())


def _same_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()

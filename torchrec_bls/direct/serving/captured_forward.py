"""Forwards in CUDA graphs, whose lookups follow the versions of the tables."""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_bls.direct.gpu.capture import Capture
from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.direct.gpu.replays import Served, replayed
from torchrec_bls.direct.serving.served_model import ServedModel
from torchrec_bls.distributed.outputs.inference_mode import outside_inference_mode
from torchrec_bls.lifetime import new_lock


class CapturedForward:
    """A forward of a model in a CUDA graph, for batches of one shape.

    The model's tables are read by a GPU (`lookup="direct"`, or `attach`). Each call copies a batch
    to the memory of the first one, and launches all kernels of the forward at once. It reads the
    newest version, whose rows stay as they are until the GPU has read them. A bad id makes its bag
    or row NaN, and a later call or forward raises::

        captured = torchrec_bls.CapturedForward(model, batch)
        for batch in batches:
            logits = captured(batch)  # the same memory each time

    Graphs of a process run one after the other. One thread calls this one at a time.

    Args:
        model: the model. It is run some times, without gradients.
        inputs: arguments of a forward, all of whose tensors are on the GPU: tensors,
            KeyedJaggedTensors, and lists, tuples and dicts of them.

    Raises:
        ValueError: no GPU reads all of the tables; or an input is not on it; or the forward gives
            its lookups other tensors of the host in each run.
        RuntimeError: the forward does what no CUDA graph can, for example wait for the GPU.
    """

    @outside_inference_mode
    def __init__(self, model: nn.Module, *inputs: Any) -> None:
        self._served = ServedModel.of(model)
        self._reads, self._gpu = self._served.reads, _gpu_of(self._served)
        # Rows of sequences are cut by numbers that the host knows.
        self._counts_matter = not all(reads.pooled for reads in self._reads)
        given, self._structure = _flat(inputs)
        for place, each in enumerate(given):
            self._check_place(each, place)
        self._own = [self._like(each) for each in given]
        self._capture = Capture(self._gpu)
        self._calling = new_lock()
        self._served.enter(sys._getframe())  # all runs are of one version
        try:
            with self._gpu.reading(_tensors_of(given)):
                self._take(given)
            forward = partial(model, *_pytree.tree_unflatten(self._own, self._structure))
            with torch.no_grad():
                self._replay, self._result = self._gpu.captured(forward, self._capture)
            self._serial, self._dense_places = 0, self._served.dense_places()
        finally:
            self._served.leave()

    @outside_inference_mode
    @torch.no_grad()
    def __call__(self, *inputs: Any) -> Any:
        """Returns the model's output for a batch, in memory that the next call writes.

        Args:
            inputs: inputs as those that were captured, with tensors of the same shapes and dtypes.
                So there are as many ids. As many of each key only if the model has an
                EmbeddingCollection, which knows the numbers from the host: call
                `features.length_per_key()` before the batch is moved, or each call waits for them.

        Raises:
            ValueError: an input differs from those that were captured; or an earlier batch had a
                bad id, and this one was not looked up; or a dense weight has other memory since.
            BLSError: no version serves.
        """
        given, structure = _flat(inputs)
        if structure != self._structure:
            raise ValueError(
                f"the forward was captured with inputs {self._structure}, and not {structure}"
            )
        for place, (new, own) in enumerate(zip(given, self._own, strict=True)):
            self._check_place(new, place)
            self._check_like(new, own, place)
        with self._calling:
            self._served.enter(sys._getframe())
            try:
                self._check_serves()
                with self._served.rows_kept():
                    launch = partial(self._launch, given)
                    used, lookups = _tensors_of(given), self._capture.lookups
                    replayed(self._gpu, lookups, launch, used, self._read())
            finally:
                self._served.leave()
            return self._result

    def _launch(self, given: Sequence[Any]) -> None:
        self._take(given)
        self._replay()

    def _take(self, given: Sequence[Any]) -> None:
        for own, new in zip(_tensors_of(self._own), _tensors_of(given), strict=True):
            own.copy_(new, non_blocking=True)

    def _check_serves(self) -> None:
        modules = self._served.modules.values()
        for reads, module in zip(self._reads, modules, strict=True):
            reads.check_serves()
            reads.check_earlier(module.input_check)
        serial = self._reads[0].generation.serial
        if serial != self._serial:
            moved = [
                name
                for name, place in self._served.dense_places().items()
                if place != self._dense_places.get(name)
            ]
            if moved:
                raise ValueError(
                    f"{moved} have other memory than when the forward was captured: capture anew"
                )
            self._serial = serial

    def _read(self) -> dict[Any, Served]:
        """Returns what is read of each module, by its forwards."""
        return {
            reads.under_way: Served(reads.generation.version, reads.registered())
            for reads in self._reads
        }

    def _like(self, given: Any) -> Any:
        """Returns an input of the graph's own, like one that was given."""
        if not isinstance(given, KeyedJaggedTensor):
            return self._gpu.empty_like(given)
        weights = given.weights_or_none()
        return KeyedJaggedTensor(
            list(given.keys()),
            self._gpu.empty_like(given.values()),
            None if weights is None else self._gpu.empty_like(weights),
            self._gpu.empty_like(given.lengths()),
            length_per_key=given.length_per_key() if self._counts_matter else None,
        )

    def _check_place(self, given: Any, place: int) -> None:
        for tensor in _tensors_of([given]):
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(
                    f"input {place} has a {type(tensor).__name__}: a CUDA graph takes tensors and "
                    "KeyedJaggedTensors"
                )
            if not self._gpu.has(tensor):
                raise ValueError(
                    f"input {place} has a tensor on {tensor.device}, and not on the GPU "
                    f"{self._gpu.device} that reads the tables: move the batch there"
                )

    def _check_like(self, new: Any, own: Any, place: int) -> None:
        is_batch = isinstance(own, KeyedJaggedTensor)
        is_other = is_batch != isinstance(new, KeyedJaggedTensor) or (
            is_batch
            and (list(new.keys()), new.weights_or_none() is None)
            != (list(own.keys()), own.weights_or_none() is None)
        )
        if is_other:
            raise ValueError(
                f"input {place} has another type or other keys than was captured, or weights "
                "where that had none"
            )
        for each, its in zip(_tensors_of([new]), _tensors_of([own]), strict=True):
            if (each.shape, each.dtype) != (its.shape, its.dtype):
                raise ValueError(
                    f"input {place} has {list(each.shape)} numbers of {each.dtype}, but the "
                    f"forward was captured with {list(its.shape)} of {its.dtype}: capture one for "
                    "each shape"
                )
        if is_batch and self._counts_matter and new.length_per_key() != own.length_per_key():
            raise ValueError(
                f"input {place} has {new.length_per_key()} ids of its keys, but the forward was "
                f"captured with {own.length_per_key()}: rows of an EmbeddingCollection are cut by "
                "these"
            )


def _gpu_of(served: ServedModel) -> Gpu:
    gpus = {reads.tables.gpu for reads in served.reads}
    gpu = gpus.pop()
    if gpus or gpu is None:
        raise ValueError(
            "a CUDA graph takes a model whose tables a GPU reads: shard with "
            "device=torch.device('cuda', n) and BLSConfig(lookup=\"direct\")"
        )
    return gpu


def _flat(inputs: Sequence[Any]) -> tuple[list[Any], Any]:
    return _pytree.tree_flatten(inputs, lambda each: isinstance(each, KeyedJaggedTensor))


def _tensors_of(flat: Sequence[Any]) -> list[Any]:
    """Returns the tensors of inputs, in the same order for inputs of the same structure."""
    tensors = []
    for each in flat:
        if isinstance(each, KeyedJaggedTensor):
            weights = each.weights_or_none()
            tensors += [each.values(), each.lengths(), *([] if weights is None else [weights])]
        else:
            tensors.append(each)
    return tensors

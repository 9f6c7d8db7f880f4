"""New weights for models that read their tables directly, while they serve.

docs/design/generations.md has the protocol, and why no batch sees two generations.
"""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrec.distributed import DistributedModelParallel

from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.new_weights import entry_of, prefix_of
from torchrec_bls.direct.publisher import Publication, Publisher
from torchrec_bls.distributed.direct_reads import DirectReads
from torchrec_bls.distributed.outputs.inference_mode import outside_inference_mode
from torchrec_bls.distributed.sharded_ebc import BLSEmbeddingBagCollection
from torchrec_bls.distributed.sharded_module import BoundedLagModule
from torchrec_bls.pipeline import bounded_lag_modules

_SERVED = "_bls_served"


def publish(
    model: nn.Module,
    state_dict: Mapping[str, Any] | None = None,
    *,
    owner: int | None = None,
    deadline: float = 60.0,
) -> Publication:
    """Announces this rank's part of the next generation of a model's weights.

    Not a collective: each rank calls it at its own time, in any thread, while batches are served.
    Once all ranks have called it, each process goes over to the new generation between two of its
    batches, in all tables and the dense weights at once. Until then, and if one of the calls fails,
    all go on with the old one. Afterwards the model's parameters show the new generation.

    Until all processes have gone over there is memory for both generations. A process without
    batches keeps its generation until its next batch, even if several were published since.

    Args:
        model: a DistributedModelParallel, or a module in it, that has been called once. Calls of
            it take new generations.
        state_dict: the new weights, with all names of `model.state_dict()`. Tables are whole
            tensors, or ShardedTensors with this rank's shards. Dense weights are copied here. None:
            the weights that the model has now, e.g. after `load_state_dict`; its dense weights
            serve as they are.
        owner: a rank whose process is gone, to publish its tables on its behalf. It takes a state
            dict with them as whole tensors; what else is in it is not looked at.
        deadline: seconds until all ranks must have announced the generation before.

    Raises:
        ValueError: the model does not read all its tables directly, a weight is missing or of a
            wrong shape or dtype, or the owner's process is alive. Nothing is announced.
        RendezvousError: there is no memory for two generations. Nothing is announced.
        PeerTimeoutError: names the ranks that have not announced the generation before.
    """
    served = ServedModel.of(model)
    if owner is not None and owner != served.rank:
        return served.publisher.publish_for(owner, state_dict, deadline)
    return served.publish(state_dict, deadline)


def generation_of(model: nn.Module) -> int:
    """Returns which generation of the weights the last batch of `model` was of, counted from 1; 0
    where tables are not read directly, as before the first batch."""
    return next(iter(bounded_lag_modules(model).values())).generation


class ServedModel:
    """A model and its generations, from the side of one process.

    Args:
        model: see `publish`.

    Attributes:
        publisher: of its tables.
        rank: of this process.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        modules = bounded_lag_modules(model)
        self._reads = _reads_of(modules)
        self.rank = self._reads[0].rank
        self.publisher = Publisher(
            {
                prefix_of(name, isinstance(module, BLSEmbeddingBagCollection)): reads.tables
                for (name, module), reads in zip(modules.items(), self._reads, strict=True)
            },
            [reads.generation for reads in self._reads],
        )
        self._follower = self.publisher.follower
        self._taken = self._follower.newest
        # New dense weights, each beside the one that is served, by generation.
        self._dense: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._hook = _unwrapped(model).register_forward_pre_hook(self._before_batch)

    @classmethod
    def of(cls, model: nn.Module) -> "ServedModel":
        """Returns the one of a model.

        Raises:
            ValueError: the model does not read all its tables directly.
        """
        kept = _unwrapped(model).__dict__
        served: ServedModel | None = kept.get(_SERVED)
        if served is not None and served._is_current():
            return served
        if served is not None:  # the model was sharded anew
            served._hook.remove()
        kept[_SERVED] = made = cls(model)
        return made

    def _is_current(self) -> bool:
        modules = bounded_lag_modules(self._model).values()
        return [id(module.direct_reads) for module in modules] == list(map(id, self._reads))

    def _before_batch(self, *_: Any) -> None:
        newest = self._follower.newest
        if newest is not self._taken:
            self._take(newest)

    @outside_inference_mode
    def _take(self, newest: tuple[Generation, ...]) -> None:
        """Goes over to a generation, in all modules or, where that fails, in none."""
        steps = [
            reads.prepare(generation) for reads, generation in zip(self._reads, newest, strict=True)
        ]
        for step in steps:
            step()
        with torch.no_grad():
            for number in sorted(self._dense):
                if number <= newest[0].number:
                    for live, new in self._dense.pop(number):
                        live.copy_(new)
        before, self._taken = self._taken, newest
        self._follower.release(before)

    def publish(self, state_dict: Mapping[str, Any] | None, deadline: float) -> Publication:
        """Publishes this rank's part; see the function."""
        rank, end = self.rank, time.monotonic() + deadline
        with self.publisher.one_at_a_time(end):
            number = self.publisher.next_of(rank, end)
            if state_dict is None:
                dense, parts = [], [reads.live.storages() for reads in self._reads if reads.live]
            else:
                dense, parts = self._new_dense(state_dict), self.publisher.parts(rank, state_dict)
            segments = self.publisher.create(rank, number, parts)
            self._dense[number] = dense
            for reads in self._reads:
                if reads.live is not None:
                    reads.live.accept()
            self.publisher.announce(rank, number, segments)
        return Publication(number, self.publisher)

    def _new_dense(self, state_dict: Mapping[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        tables, dense = self.publisher.table_keys(), []
        for key, live in self._model.state_dict().items():
            if key in tables or not isinstance(live, torch.Tensor):
                continue
            new = entry_of(state_dict, key)
            if (new.shape, new.dtype) != (live.shape, live.dtype):
                raise ValueError(
                    f"'{key}' has shape {list(new.shape)} and {new.dtype}, but the model's has "
                    f"{list(live.shape)} and {live.dtype}"
                )
            dense.append((live, new.detach().clone()))
        return dense


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedModelParallel) else model


def _reads_of(modules: Mapping[str, BoundedLagModule]) -> list[DirectReads]:
    exchanging = [name for name, module in modules.items() if module.direct_reads is None]
    if exchanging:
        raise ValueError(
            f"modules {exchanging} do not read their tables directly, or were not called yet: "
            'shard with BLSConfig(lookup="direct"), and call the model once before publishing'
        )
    return [module.direct_reads for module in modules.values() if module.direct_reads is not None]

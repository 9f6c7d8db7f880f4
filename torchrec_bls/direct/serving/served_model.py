"""One process's side of a model whose tables are read directly, and of its generations."""

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torchrec.distributed import DistributedModelParallel

from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.holders import is_alive, pid_of
from torchrec_bls.direct.new_weights import check_is_dense, entry_of, prefix_of
from torchrec_bls.direct.reads.attached_collection import AttachedCollection
from torchrec_bls.direct.reads.direct_reads import DirectReads
from torchrec_bls.direct.serving.publisher import Publication, Publisher
from torchrec_bls.direct.serving.serving_state import ServingState
from torchrec_bls.distributed.exchanged_module import ExchangedModule
from torchrec_bls.distributed.outputs.inference_mode import outside_inference_mode
from torchrec_bls.errors import ProtocolError
from torchrec_bls.pipeline import bounded_lag_modules

ReadingModule = ExchangedModule | AttachedCollection

_SERVED = "_bls_served"
# A tensor of the model, and its new value.
_Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class ServedModel:
    """See the module's docstring.

    Args:
        model: a sharded model that has been called once, or an attached one.

    Attributes:
        modules: modules that read tables, by name.
        reads: direct reads of each module.
        publisher: publisher of its tables.
        rank: rank whose tables this process publishes; None where it only reads.
    """

    # Making one starts a thread and adds hooks to the model.
    _making = threading.Lock()

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        _refuse_quantized(model)
        self.modules = reading_modules(model)
        self.reads = _reads_of(self.modules)
        self.rank = self.reads[0].rank
        # What the modules read. The follower's thread may have a newer one at any time after its
        # start: that is one to change to.
        self._taken = tuple(reads.generation for reads in self.reads)
        self.publisher = Publisher(
            {
                prefix_of(name, reads.form.pooled): reads.tables
                for name, reads in zip(self.modules, self.reads, strict=True)
            },
            self._taken,
        )
        self._follower = self.publisher.follower
        # New dense weights by generation, each with the served one.
        self._dense: dict[int, _Pairs] = {}
        # Held while the generation changes, and by code that needs one generation's weights.
        self._changing = threading.Lock()
        self._readers: dict[int, None] = {}
        self._hook = _unwrapped(model).register_forward_pre_hook(self._before_batch)

    @classmethod
    def of(cls, model: nn.Module) -> "ServedModel":
        """Returns the served model of a model.

        Raises:
            ValueError: the model does not read all its tables directly.
        """
        kept = _unwrapped(model).__dict__
        with cls._making:
            served: ServedModel | None = kept.get(_SERVED)
            if served is not None and served._is_current():
                return served
            if served is not None:  # the model was sharded again
                served._hook.remove()
            kept[_SERVED] = made = cls(model)
            return made

    @classmethod
    def forget(cls, model: nn.Module) -> None:
        """Undoes `of`; nothing happens where it was not called."""
        with cls._making:
            served: ServedModel | None = _unwrapped(model).__dict__.pop(_SERVED, None)
            if served is not None:
                served._hook.remove()

    def _is_current(self) -> bool:
        modules = reading_modules(self._model).values()
        return [id(module.direct_reads) for module in modules] == list(map(id, self.reads))

    def _before_batch(self, *_: Any) -> None:
        newest = self._follower.newest
        if newest is not self._taken:
            self._take(newest)

    @outside_inference_mode
    def _take(self, newest: tuple[Generation, ...]) -> None:
        """Changes to a generation, in all modules or, if that fails, in none."""
        steps = [
            reads.prepare(generation) for reads, generation in zip(self.reads, newest, strict=True)
        ]
        dense = self._dense_of(newest[0])
        with self._changing:
            for step in steps:
                step()
            with torch.no_grad():
                for live, new in dense:
                    live.copy_(new)
            for number in sorted(self._dense):
                if number <= newest[0].number:
                    del self._dense[number]
            before, self._taken = self._taken, newest
        self._follower.release(before)

    def _dense_of(self, newest: Generation) -> _Pairs:
        if newest.number not in self._dense:  # another process published it
            given = self.publisher.dense_weights(newest)
            if given is None:
                return []
            return pairs_of(dict(self._live_dense()), given, f"generation {newest.number}")
        # Another thread may be adding an entry.
        numbers = [number for number in sorted(self._dense) if number <= newest.number]
        return [pair for number in numbers for pair in self._dense[number]]

    def snapshot(self) -> tuple[tuple[Generation, ...], dict[str, torch.Tensor]]:
        """Returns what is served now: the tables of each module, and a copy of the dense weights by
        name."""
        with self._changing:
            dense = {name: live.detach().clone() for name, live in self._live_dense()}
            return self._taken, dense

    def add_reader(self, identity: int) -> None:
        """Notes that a process has attached to this one, however often."""
        self._living_readers()  # those that are gone do not add up
        self._readers[identity] = None

    def _living_readers(self) -> list[int]:
        for each in list(self._readers):
            if not is_alive(each):
                self._readers.pop(each, None)
        return list(self._readers)

    def state(self) -> ServingState:
        """Returns what is served, and which owners are gone."""
        tables = self.reads[0].tables
        checks = [module.input_check for module in self.modules.values()]
        return ServingState(
            rank=self.rank,
            generation=self._taken[0].number,
            announced=self.publisher.announced,
            owners=tables.owners,
            owners_gone=tuple(self.publisher.owners_gone()),
            readers=tuple(map(pid_of, self._living_readers())),
            problem=self._follower.problem,
            rows_read=tuple(torch.stack([each.rows_read for each in self.reads]).sum(0).tolist()),
            refused_batches=sum(check.refused_batches for check in checks),
            replaced_ids=sum(check.replaced_ids for check in checks),
        )

    def publish(self, state_dict: Mapping[str, Any] | None, deadline: float) -> Publication:
        """Publishes this rank's part; see the function `publish`."""
        rank, end = self.rank, time.monotonic() + deadline
        if rank is None:
            raise ValueError(
                "this process reads the tables of others and publishes none: attach(owner=...) in "
                "the place of a rank that is gone, or publish(owner=...) on its behalf"
            )
        if state_dict is None and any(reads.live is None for reads in self.reads):
            raise ValueError(
                f"the tables of rank {rank} were not loaded in this process, which has attached to "
                "them: give their new weights as a state_dict"
            )
        with self.publisher.one_at_a_time(end):
            number = self.publisher.next_of(rank, end)
            live = dict(self._live_dense())
            if state_dict is None:
                dense, parts = live, [each.live.storages() for each in self.reads if each.live]
            else:
                dense, parts = _new_dense(live, state_dict), self.publisher.parts(rank, state_dict)
            segments = self.publisher.create(rank, number, parts, dense)
            # Without a state dict the live dense weights serve as they are.
            self._dense[number] = (
                [] if state_dict is None else [(live[name], new) for name, new in dense.items()]
            )
            for reads in self.reads:
                if reads.live is not None:
                    reads.live.accept()
            self.publisher.announce(rank, number, segments)
        return Publication(number, self.publisher)

    def publish_for(
        self, owner: int, state_dict: Mapping[str, Any] | None, deadline: float
    ) -> Publication:
        """Publishes the part of a rank that is gone; see the function `publish`."""
        live = dict(self._live_dense())
        dense = None
        if state_dict is not None and live.keys() <= state_dict.keys():
            dense = _new_dense(live, state_dict)
        return self.publisher.publish_for(owner, state_dict, dense, deadline)

    def _live_dense(self) -> Iterator[tuple[str, torch.Tensor]]:
        tables = self.publisher.table_keys()
        for key, live in self._model.state_dict().items():
            if key not in tables and isinstance(live, torch.Tensor):
                yield key, live


def reading_modules(model: nn.Module) -> dict[str, ReadingModule]:
    """Returns the modules of a sharded or attached model that read tables, by name.

    Raises:
        ValueError: there is none, or an embedding module was sharded by another sharder.
    """
    attached: dict[str, ReadingModule] = {
        name: module
        for name, module in _unwrapped(model).named_modules()
        if isinstance(module, AttachedCollection)
    }
    return attached or {**bounded_lag_modules(model)}


def pairs_of(
    live: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor], where: str
) -> _Pairs:
    """Returns each dense tensor of a model with its new value.

    Args:
        live: tensors of the model by name.
        given: new values by name.
        where: source of the new values, for messages.

    Raises:
        ProtocolError: the new values are another model's.
    """
    if live.keys() != given.keys():
        raise ProtocolError(
            f"{where} has dense weights of another model: {sorted(given.keys() - live.keys())} are "
            f"not in this one, and {sorted(live.keys() - given.keys())} are here alone"
        )
    for name, tensor in live.items():
        new = given[name]
        if (new.shape, new.dtype) != (tensor.shape, tensor.dtype):
            raise ProtocolError(
                f"'{name}' of {where} has shape {list(new.shape)} and {new.dtype}, but this "
                f"model's {list(tensor.shape)} and {tensor.dtype}"
            )
    return [(tensor, given[name]) for name, tensor in live.items()]


def _new_dense(
    live: Mapping[str, torch.Tensor], state_dict: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    dense = {}
    for key, tensor in live.items():
        new = entry_of(state_dict, key)
        check_is_dense(key, new)
        if (new.shape, new.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"'{key}' has shape {list(new.shape)} and {new.dtype}, but the model's has "
                f"{list(tensor.shape)} and {tensor.dtype}"
            )
        dense[key] = new.detach().clone()
    return dense


def _refuse_quantized(model: nn.Module) -> None:
    quantized = [
        name for name, module in model.named_modules() if getattr(module, "is_quantized", False)
    ]
    if quantized:
        raise ValueError(
            f"{quantized} have quantized tables, which take no new weights and are not handed "
            "over: shard the model again, with the new weights"
        )


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedModelParallel) else model


def _reads_of(modules: Mapping[str, ReadingModule]) -> list[DirectReads]:
    without = {name: module for name, module in modules.items() if module.direct_reads is None}
    uncalled = [
        name
        for name, module in without.items()
        if isinstance(module, ExchangedModule) and module.awaits_first_call
    ]
    if exchanging := sorted(without.keys() - set(uncalled)):
        raise ValueError(
            f"modules {exchanging} do not read their tables directly, but exchange embeddings: "
            'shard with BLSConfig(lookup="direct")'
        )
    if uncalled:
        raise ValueError(
            f"modules {uncalled} were not called yet, and share their tables in the first call: "
            "call the model once before"
        )
    return [module.direct_reads for module in modules.values() if module.direct_reads is not None]

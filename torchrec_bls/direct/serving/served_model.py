"""One process's side of a model whose tables are read directly, and of its versions."""

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.distributed import DistributedModelParallel

from torchrec_bls.direct.arguments import FIRST_VERSION
from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.new_weights import check_is_dense, entry_of, prefix_of
from torchrec_bls.direct.process import is_alive, new_lock, pid_of, this_process
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
    """

    # Making one starts a thread and adds hooks to the model.
    _making = new_lock()

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        _refuse_quantized(model)
        self.modules = reading_modules(model)
        self.reads = _reads_of(self.modules)
        self.publisher = Publisher(
            {
                prefix_of(name, reads.form.pooled): reads.tables
                for name, reads in zip(self.modules, self.reads, strict=True)
            },
            [reads.generation for reads in self.reads],
            publishes=self.rank is not None,
        )
        self._follower = self.publisher.follower
        self._taken = self._follower.newest
        # New dense weights by serial number, each with the served one; and the version.
        self._dense: dict[int, tuple[str, _Pairs]] = {}
        # Held while the version changes, and by code that needs one version's weights.
        self._changing = new_lock()
        self._readers: list[int] = []
        self._beginning = new_lock()
        # The model was called before, so that OpenMP has started as many.
        self._threads = torch.get_num_threads()
        self._process = self.reads[0].tables.process
        self._begin_in_child()
        for reads in self.reads:
            reads.followed = True
        self._hook = _unwrapped(model).register_forward_pre_hook(self._before_batch)

    @classmethod
    def of(cls, model: nn.Module) -> "ServedModel":
        """Returns the served model that has the tables of a model: of the model itself, or of one
        that it is a part of. So one object makes all announcements on their control pages.

        Raises:
            ValueError: the model does not read all its tables directly, or is served together with
                other tables, or has a part that is served alone.
        """
        kept = _unwrapped(model).__dict__
        with cls._making:
            served: ServedModel | None = kept.get(_SERVED)
            if served is not None and served._is_current():
                served._begin_in_child()
                return served
            if served is not None:  # the model was sharded again
                served._end()
            reads = _reads_of(reading_modules(model))
            for other in [each for each in map(_served_with, reads) if each is not None]:
                if other._is_current():
                    if other._has(model, reads):
                        return other
                    other._give_way(reads)
            kept[_SERVED] = made = cls(model)
            _served.update({id(each): made for each in reads})
            return made

    def _is_current(self) -> bool:
        modules = reading_modules(self._model).values()
        return [id(module.direct_reads) for module in modules] == list(map(id, self.reads))

    @property
    def rank(self) -> int | None:
        """Returns the rank whose tables this process publishes; None where it only reads, as a
        forked child does."""
        reads = self.reads[0]
        return reads.rank if reads.tables.process.is_own else None

    @outside_inference_mode
    def _begin_in_child(self) -> None:
        """Makes this the model of a process that was forked since the model was made: a reader with
        a follower and counts of its own. Else it does nothing.

        Raises:
            ValueError: the child would wait for its parent's threads.
        """
        with self._beginning:
            if self._process.is_own:
                return
            if min(self._threads, torch.get_num_threads()) > 1:
                raise ValueError(
                    f"process {self._process.pid} had {self._threads} torch threads when it forked "
                    "this process, which has none of them and would wait for them for ever: call "
                    "torch.set_num_threads(1) there before the first batch, or here"
                )
            for reads in self.reads:
                reads.begin_in_child()
            for module in self.modules.values():
                module.input_check.begin_in_child()
            self._dense.clear()  # the parent's publish may fail; segments have what it announced
            self._readers = []
            self._follower.start()
            self._process = this_process()

    def _refuse_in_child(self) -> None:
        process = self.reads[0].tables.process
        if not process.is_own:
            raise ValueError(
                f"this process was forked from process {process.pid}, and reads its tables: "
                "publish there. In the place of a rank that is gone, call attach(owner=...) with a "
                "new model; a forked child may do that as well"
            )

    def _has(self, model: nn.Module, reads: Sequence[DirectReads]) -> bool:
        """Returns whether `model` is the served one or a part of it, with all the tables.

        Raises:
            ValueError: it is a part without some of the tables.
        """
        if not any(module is _unwrapped(model) for module in _unwrapped(self._model).modules()):
            return False
        if missing := set(self.reads) - set(reads):
            raise ValueError(
                f"this module is served together with {len(missing)} other modules, since all of "
                f"them change at once ({sorted(self.modules)}): give the whole model"
            )
        return True

    def _give_way(self, reads: Sequence[DirectReads]) -> None:
        """Ends, for one that has these tables and more of the model.

        Raises:
            ValueError: some tables are not among these, or a publication depends on this one.
        """
        depends = self.publisher.versions.serial > self._taken[0].serial
        depends |= bool(self.publisher.versions.pending())
        depends |= self._taken[0].version != FIRST_VERSION and len(reads) > len(self.reads)
        if depends or not set(self.reads) <= set(reads):
            raise ValueError(
                f"{sorted(self.modules)} were published as tables of another module, which shares "
                "some with this one: give the module that was given before"
            )
        self._end()

    def _end(self) -> None:
        self._hook.remove()
        _unwrapped(self._model).__dict__.pop(_SERVED, None)
        self._follower.stop()

    def whole(self, model: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a state dict of `model`, which is the served model or a part of it, as one of the
        served model. Dense weights outside of the part stay as they are."""
        [prefix] = [
            f"{name}." if name else ""
            for name, module in _unwrapped(self._model).named_modules()
            if module is _unwrapped(model)
        ]
        if not prefix:
            return dict(state_dict)
        given = {f"{prefix}{name}": value for name, value in state_dict.items()}
        outside = {name: live for name, live in self._live_dense() if not name.startswith(prefix)}
        return {**outside, **given}

    def _before_batch(self, *_: Any) -> None:
        if not self._process.is_own:
            self._begin_in_child()
        newest = self._follower.newest
        if newest is not self._taken:
            self._take(newest)

    @outside_inference_mode
    def _take(self, newest: tuple[Generation, ...]) -> None:
        """Changes to a version, in all modules or, if that fails, in none."""
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
            self._forget_dense(lambda serial: serial <= newest[0].serial)
            before, self._taken = self._taken, newest
        self._follower.release(before)

    def _dense_of(self, newest: Generation) -> _Pairs:
        own, _ = self._dense.get(newest.serial, ("", []))
        if own != newest.version:  # another process published it
            given = self.publisher.dense_weights(newest)
            if given is None:
                return []
            return pairs_of(dict(self._live_dense()), given, f"version {newest.version!r}")
        # Another thread may be adding an entry.
        serials = [serial for serial in sorted(self._dense) if serial <= newest.serial]
        return [pair for serial in serials for pair in self._dense[serial][1]]

    def _forget_dense(self, which: Callable[[int], bool]) -> None:
        for serial in sorted(self._dense):
            if which(serial):
                del self._dense[serial]

    def snapshot(self) -> tuple[tuple[Generation, ...], dict[str, torch.Tensor]]:
        """Returns what is served now: the tables of each module, and a copy of the dense weights by
        name."""
        with self._changing:
            dense = {name: live.detach().clone() for name, live in self._live_dense()}
            return self._taken, dense

    def add_reader(self, identity: int) -> None:
        """Notes that a process has attached to this one."""
        self._readers = [each for each in self._readers if is_alive(each)] + [identity]

    def state(self) -> ServingState:
        """Returns what is served, and which owners are gone."""
        tables = self.reads[0].tables
        checks = [module.input_check for module in self.modules.values()]
        serial, announced = self.publisher.versions.serving
        pending = self.publisher.versions.pending()
        return ServingState(
            rank=self.rank,
            version=self._taken[0].version,
            serial=self._taken[0].serial,
            announced=announced,
            announced_serial=serial,
            pending=pending,
            missing=tuple(sorted(set(range(tables.owners)) - pending.keys())) if pending else (),
            owners=tables.owners,
            owners_gone=tuple(self.publisher.owners_gone()),
            readers=tuple(pid_of(each) for each in self._readers if is_alive(each)),
            problem=self.publisher.problem,
            rows_read=tuple(torch.stack([each.rows_read for each in self.reads]).sum(0).tolist()),
            refused_batches=sum(check.refused_batches for check in checks),
            replaced_ids=sum(check.replaced_ids for check in checks),
        )

    def publish(
        self, version: str | None, state_dict: Mapping[str, Any] | None, deadline: float
    ) -> Publication:
        """Publishes this rank's part; see the function `publish`."""
        self._refuse_in_child()
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
        version = self.publisher.named(version)
        with self.publisher.one_at_a_time(end):
            live = dict(self._live_dense())
            if state_dict is None:
                dense, parts = live, [each.live.storages() for each in self.reads if each.live]
            else:  # before anything is withdrawn for it
                dense, parts = _new_dense(live, state_dict), self.publisher.parts(rank, state_dict)
            serial, is_new = self.publisher.versions.clear_way(rank, version, end)
            if not is_new:
                return Publication(version, True, rank, serial, self.publisher)
            self._forget_dense(lambda other: other >= serial)  # withdrawn
            self._follower.drop(rank, serial)
            segments = self.publisher.create(rank, version, parts, dense)
            # Without a state dict the live dense weights serve as they are.
            pairs = [] if state_dict is None else [(live[name], dense[name]) for name in dense]
            self._dense[serial] = version, pairs
            for reads in self.reads:
                if reads.live is not None:
                    reads.live.accept()
            self.publisher.announce(rank, serial, version, segments)
        return Publication(version, False, rank, serial, self.publisher)

    def publish_for(
        self,
        owner: int,
        version: str | None,
        state_dict: Mapping[str, Any] | None,
        deadline: float,
    ) -> Publication:
        """Publishes the part of a rank that is gone; see the function `publish`."""
        self._refuse_in_child()
        live = dict(self._live_dense())
        dense = None
        if state_dict is not None and live.keys() <= state_dict.keys():
            dense = _new_dense(live, state_dict)
        version = self.publisher.named(version)
        return self.publisher.publish_for(owner, version, state_dict, dense, deadline)

    def _live_dense(self) -> Iterator[tuple[str, torch.Tensor]]:
        tables = self.publisher.table_keys()
        for key, live in self._model.state_dict().items():
            if key not in tables and isinstance(live, torch.Tensor):
                yield key, live


# Served models by the identity of each of their direct reads, which they keep.
_served: "weakref.WeakValueDictionary[int, ServedModel]" = weakref.WeakValueDictionary()


def _served_with(reads: DirectReads) -> ServedModel | None:
    return _served.get(id(reads))


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

"""One process's side of a model whose tables are read directly, and of its versions."""

import sys
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle
from torchrec.distributed import DistributedModelParallel

from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.new_weights import prefix_of
from torchrec_bls.direct.process import is_alive, new_lock, pid_of, this_process
from torchrec_bls.direct.reads.attached_collection import AttachedCollection
from torchrec_bls.direct.reads.direct_reads import DirectReads
from torchrec_bls.direct.serving.dense_state import DenseState
from torchrec_bls.direct.serving.publisher import Publication, Publisher
from torchrec_bls.direct.serving.serving_state import ServingState
from torchrec_bls.direct.serving.switches import Switches
from torchrec_bls.direct.serving.versions import PAUSE
from torchrec_bls.distributed.bounded_lag_module import BoundedLagModule
from torchrec_bls.distributed.outputs.inference_mode import outside_inference_mode
from torchrec_bls.errors import PeerTimeoutError
from torchrec_bls.pipeline import bounded_lag_modules

ReadingModule = BoundedLagModule | AttachedCollection

_SERVED = "_bls_served"
# Seconds that a switch waits for the forwards of other threads. It waits for one of each.
_LONGEST_FORWARD = 60.0


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
        self.modules = reading_modules(model)
        self.reads = _reads_of(self.modules)
        # Before the thread starts: a newer version that it has mapped by then is not taken yet.
        serving = tuple(reads.generation for reads in self.reads)
        self.publisher = Publisher(
            {
                prefix_of(name, reads.form.pooled): reads.tables
                for name, reads in zip(self.modules, self.reads, strict=True)
            },
            serving,
            publishes=self.rank is not None,
        )
        self._follower = self.publisher.follower
        self._dense = DenseState(_unwrapped(model), self.modules.values())
        self._switches = Switches(self.reads, self._dense, serving, self._published_dense)
        # Versions and dense states by serial number, as this process has published them.
        self._published: dict[int, tuple[str, dict[str, Any]]] = {}
        self._readers: dict[int, None] = {}
        self._beginning = new_lock()
        # The model was called before, so that OpenMP has started as many.
        self._threads = torch.get_num_threads()
        self._process = self.reads[0].tables.process
        self._begin_in_child()
        for reads in self.reads:
            reads.followed = True
        self._hooks: list[RemovableHandle] = []
        try:
            bare = _unwrapped(model)
            self._hooks.append(bare.register_forward_pre_hook(self._before_batch))
            self._hooks.append(bare.register_forward_hook(self._after_batch, always_call=True))
            self._switches.gate.admit_running(bare)
        except BaseException:  # a signal, for example
            self._leave_model()
            raise

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
            _refuse_quantized(model)
            reads = _reads_of(reading_modules(model))
            parts = []
            for other in {each for each in map(_served_with, reads) if each is not None}:
                if other._is_current():
                    if other._has(model, reads):
                        return other
                    other._give_way(reads)
                    parts.append(other)
            kept[_SERVED] = made = cls(model)
            for part in parts:
                for serial, (version, dense) in part._published.items():
                    made._published[serial] = version, made.whole(part._model, dense)
            _served.update({id(each): made for each in reads})
            return made

    @classmethod
    def forget(cls, model: nn.Module) -> None:
        """Undoes `of`; nothing happens where it was not called."""
        with cls._making:
            served: ServedModel | None = _unwrapped(model).__dict__.get(_SERVED)
            if served is not None:
                served._end()

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
            # The parent's publish may fail; segments have what it announced.
            self._published.clear()
            self._readers = {}
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
        """Ends, for one that has these tables and more of the model. The follower goes on for what
        was published here.

        Raises:
            ValueError: some tables are not among these; or there are more, and the versions of
                these have gone on without them.
        """
        has_history = self.publisher.versions.serial > 1 or self.rank in (
            self.publisher.versions.pending()
        )
        if not set(self.reads) <= set(reads) or (has_history and len(reads) > len(self.reads)):
            raise ValueError(
                f"{sorted(self.modules)} were published as tables of another module, which shares "
                "some with this one: give the module that was given before"
            )
        self._leave_model()

    def _end(self) -> None:
        self._leave_model()
        self._follower.stop()

    def _leave_model(self) -> None:
        for reads in self.reads:
            _served.pop(id(reads), None)
        for hook in self._hooks:
            hook.remove()
        _unwrapped(self._model).__dict__.pop(_SERVED, None)

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
        dense = self._dense.current()
        outside = {name: live for name, live in dense.items() if not name.startswith(prefix)}
        return {**outside, **given}

    def _before_batch(self, *_: Any) -> None:
        if is_compiling():
            self._enter_uncompiled()
        else:
            self._enter(sys._getframe(1))

    def _after_batch(self, *_: Any) -> None:
        if is_compiling():
            self._leave_uncompiled()
        else:
            self._switches.gate.leave()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter_uncompiled(self) -> None:
        frame = sys._getframe()
        while frame.f_back is not None and _is_on_the_way(frame):
            frame = frame.f_back
        self._enter(frame)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _leave_uncompiled(self) -> None:
        self._switches.gate.leave()

    def _enter(self, frame: FrameType) -> None:
        """Begins a forward that runs as long as `frame`, with the version that serves."""
        if not self._process.is_own:
            self._begin_in_child()
        switches = self._switches
        is_inner = switches.gate.enter(frame)
        while self._follower.newest is not switches.settled and not is_inner:
            switches.gate.leave()
            self._switch()
            switches.gate.enter(frame)
            if not switches.is_half_done:  # yet newer weights may wait for the next batch
                break

    @outside_inference_mode
    def _switch(self) -> None:
        """Changes to the version that serves, in all modules or, if that fails, in none."""
        switches = self._switches
        with switches.gate.lock:
            before = switches.taken
            switches.take(self._follower.newest, _LONGEST_FORWARD)
            for serial in list(self._published):
                if serial <= switches.taken[0].serial:
                    self._published.pop(serial, None)
        if switches.taken is not before:
            self._follower.release(before)

    def _published_dense(self, newest: Generation) -> Mapping[str, Any] | None:
        """Returns the dense state of a version, or None if there is none."""
        version, own = self._published.get(newest.serial, ("", None))
        if version == newest.version:
            return own
        given = self.publisher.dense_weights(newest)  # another process published it
        if given is not None:
            self._dense.check(given, f"version {newest.version!r}")
        return given

    def snapshot(self) -> tuple[tuple[Generation, ...], dict[str, Any]]:
        """Returns what is served now: the tables of each module, and a copy of the dense weights by
        name."""
        with self._switches.gate.lock:
            self._switches.finish(_LONGEST_FORWARD)
            return self._switches.taken, self._dense.copy()

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
        serial, announced = self.publisher.versions.serving
        pending = self.publisher.versions.pending()
        return ServingState(
            rank=self.rank,
            version=self._switches.taken[0].version,
            serial=self._switches.taken[0].serial,
            announced=announced,
            announced_serial=serial,
            pending=pending,
            missing=tuple(sorted(set(range(tables.owners)) - pending.keys())) if pending else (),
            owners=tables.owners,
            owners_gone=tuple(self.publisher.owners_gone()),
            readers=tuple(map(pid_of, self._living_readers())),
            problem=self._problem(),
            rows_read=tuple(torch.stack([each.rows_read for each in self.reads]).sum(0).tolist()),
            refused_batches=sum(check.refused_batches for check in checks),
            replaced_ids=sum(check.replaced_ids for check in checks),
        )

    def _problem(self) -> str:
        behind = [reads.live.behind for reads in self.reads if reads.live is not None]
        return next(filter(None, [self.publisher.problem, self._switches.problem, *behind]), "")

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
            # What can't be published is refused before anything is withdrawn for it.
            parts = None if state_dict is None else self.publisher.parts(rank, state_dict)
            dense = self._new_dense(state_dict)
            serial, is_new = self.publisher.versions.clear_way(rank, version, end)
            if not is_new:
                return Publication(version, True, rank, serial, self.publisher)
            self._published.pop(serial, None)  # withdrawn
            self._follower.drop(rank, serial)
            if parts is None:
                self._show_served(serial - 1, end)
            # No switch changes tensors while another thread looks at them.
            with self._switches.gate.lock:
                writes = self._writes()
                if parts is None:
                    dense = self._new_dense_inside(None)
                    live = [reads.live.storages() for reads in self.reads if reads.live]
                    segments = self.publisher.create(rank, version, live, dense)
                    self._switches.published_in_place()
            if parts is not None:
                segments = self.publisher.create(rank, version, parts, dense)
            self._published[serial] = version, dense
            for reads, count in zip(self.reads, writes, strict=True):
                if reads.live is not None:
                    reads.live.published(count)
            self.publisher.announce(rank, serial, version, segments)
        return Publication(version, False, rank, serial, self.publisher)

    def _new_dense(self, state_dict: Mapping[str, Any] | None) -> dict[str, Any]:
        with self._switches.gate.lock:
            return self._new_dense_inside(state_dict)

    def _new_dense_inside(self, state_dict: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns a copy of new dense weights, or of those of this moment."""
        self._refuse_strangers()
        return self._dense.new(self._dense.current() if state_dict is None else state_dict)

    def _writes(self) -> list[int]:
        return [0 if reads.live is None else reads.live.writes() for reads in self.reads]

    def _refuse_strangers(self) -> None:
        """Raises ValueError if a table's parameter shows something else than the table."""
        for (name, module), reads in zip(self.modules.items(), self.reads, strict=True):
            parameters: Iterable[tuple[str, torch.Tensor]] = module.named_parameters(name)  # type: ignore[union-attr]
            if reads.live is not None and (strangers := reads.live.strangers(parameters)):
                raise ValueError(
                    f"{strangers} were replaced, or converted to another dtype, since the tables "
                    "are read directly: shard a model of that dtype anew, and leave its parameters"
                )

    def _show_served(self, serial: int, end: float) -> None:
        """Makes the weights show the version that serves, so that none of it is lost.

        Raises:
            ValueError: they were written to before, and the writes would mix with it. Or the model
                refuses it.
            PeerTimeoutError: the version can't be mapped.
        """
        while self._follower.newest[0].serial < serial:
            if time.monotonic() >= end:
                why = self._follower.problem or "it is still being mapped"
                raise PeerTimeoutError(f"the version that serves can't be shown here: {why}")
            time.sleep(PAUSE)
        switches = self._switches
        if self._follower.newest is not switches.taken or switches.is_half_done:
            with switches.gate.lock:
                would_lose_writes = switches.would_lose_writes
            shown, serving = switches.taken[0].version, self._follower.newest[0].version
            if would_lose_writes:
                raise ValueError(
                    f"the weights were written to while they show version {shown!r}, but "
                    f"{serving!r} serves. Give all weights as a state_dict, e.g. publish(model, "
                    "model.state_dict(), version=...)"
                )
            self._switch()
            if switches.taken[0].serial < serial:
                raise ValueError(
                    f"the weights show version {shown!r}, but {serving!r} serves, and can't be "
                    f"taken: {switches.problem}"
                )
        with switches.gate.lock:
            for reads in self.reads:
                reads.show_served()

    def publish_for(
        self,
        owner: int,
        version: str | None,
        state_dict: Mapping[str, Any] | None,
        deadline: float,
    ) -> Publication:
        """Publishes the part of a rank that is gone; see the function `publish`."""
        self._refuse_in_child()
        dense = None
        with self._switches.gate.lock:
            if state_dict is not None and self._dense.current().keys() <= state_dict.keys():
                dense = self._dense.new(state_dict)
        version = self.publisher.named(version)
        return self.publisher.publish_for(owner, version, state_dict, dense, deadline)


def _is_on_the_way(frame: FrameType) -> bool:
    """Returns whether a frame ends before the forward whose hook it is a part of."""
    file = frame.f_code.co_filename
    return file == __file__ or "/torch/_dynamo/" in file


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
        if isinstance(module, BoundedLagModule) and module.awaits_first_call
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

"""One process's side of a model whose tables are read directly, and of its versions."""

import sys
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.utils.hooks import RemovableHandle

from torchrec_bls.direct.arguments import FIRST_VERSION
from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.new_weights import CheckpointWeights, prefix_of
from torchrec_bls.direct.process import this_process
from torchrec_bls.direct.reads.direct_reads import AnyReads
from torchrec_bls.direct.serving.dense_state import DenseState
from torchrec_bls.direct.serving.dense_versions import DenseVersions
from torchrec_bls.direct.serving.follower import nothing
from torchrec_bls.direct.serving.probe import Trial
from torchrec_bls.direct.serving.publication_facts import PublicationFacts
from torchrec_bls.direct.serving.publisher import Publisher
from torchrec_bls.direct.serving.readers import readers_of
from torchrec_bls.direct.serving.reading_modules import (
    reading_modules,
    reads_of,
    unwrapped,
)
from torchrec_bls.direct.serving.serving_state import ServingState, Standing
from torchrec_bls.direct.serving.side_pins import SidePins
from torchrec_bls.direct.serving.switches import Switches
from torchrec_bls.direct.serving.weights_publisher import WeightsPublisher
from torchrec_bls.distributed.outputs.inference_mode import outside_inference_mode
from torchrec_bls.lifetime import new_lock

_SERVED = "_bls_served"
# Seconds that a forward waits for a later version, once the rows of its own are written over.
_LONGEST_WAIT = 60.0


class ServedModel:
    """See the module's docstring.

    Args:
        model: a sharded model that has been called once, or an attached one.

    Attributes:
        modules: modules that read tables, by name.
        reads: direct reads of each module.
        publisher: publisher of its tables.
        weights: publisher of its weights: tables and dense state.
    """

    # Making one starts a thread and adds hooks to the model.
    _making = new_lock()

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.modules = reading_modules(model)
        self.reads = reads_of(self.modules)
        # Before the thread starts: a newer version that it has mapped by then is not taken yet.
        serving = tuple(reads.generation for reads in self.reads)
        self.publisher = Publisher(
            {
                prefix_of(name, reads.pooled): reads.tables
                for name, reads in zip(self.modules, self.reads, strict=True)
            },
            serving,
            publishes=self.reads[0].rank is not None,
        )
        self._follower = self.publisher.follower
        self._dense = DenseState(unwrapped(model), self.modules.values())
        self._dense_versions = DenseVersions(self._dense, self.publisher)
        self._switches = Switches(
            self.reads, self._dense, self._dense_versions, self._follower, serving
        )
        self.weights = WeightsPublisher(
            self.modules,
            self.reads,
            self.publisher,
            self._dense,
            self._dense_versions,
            self._switches,
            Trial(unwrapped(model), self.modules, self),
        )
        self._failed_publishes = 0
        self._counting = new_lock()
        self._beginning = new_lock()
        # The model was called before, so that OpenMP has started as many.
        self._threads = torch.get_num_threads()
        self._process = self.reads[0].tables.process
        self._begin_in_child()
        self._pins = SidePins(self._switches.gate, self._follower.pin)
        for reads in self.reads:
            reads.followed, reads.pins = True, self._pins
        self._hooks: list[RemovableHandle] = []
        try:
            bare = unwrapped(model)
            self._hooks.append(bare.register_forward_pre_hook(self._before_batch))
            self._hooks.append(bare.register_forward_hook(self._after_batch, always_call=True))
            self._switches.gate.admit_running(bare)
            self._follower.after_look = self._after_look
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
        kept = unwrapped(model).__dict__
        with cls._making:
            served: ServedModel | None = kept.get(_SERVED)
            if served is not None and served._is_current():
                served._begin_in_child()
                return served
            if served is not None:  # the model was sharded again
                served._end()
            reads = reads_of(reading_modules(model))
            parts = []
            for other in {each for each in map(_served_with, reads) if each is not None}:
                if other._is_current():
                    if other._has(model, reads):
                        return other
                    other._give_way(reads)
                    parts.append(other)
            kept[_SERVED] = made = cls(model)
            for part in parts:
                for serial, (version, dense) in part._dense_versions.kept().items():
                    whole = dict(made.whole(part._model, dense))
                    made._dense_versions.keep(serial, version, whole)
            _served.update({id(each): made for each in reads})
            return made

    @classmethod
    def forget(cls, model: nn.Module) -> None:
        """Undoes `of`; nothing happens where it was not called."""
        with cls._making:
            served: ServedModel | None = unwrapped(model).__dict__.get(_SERVED)
            if served is not None:
                served._end()

    def _is_current(self) -> bool:
        modules = reading_modules(self._model).values()
        return [id(module.direct_reads) for module in modules] == list(map(id, self.reads))

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
            self._dense_versions.begin_in_child()
            self._failed_publishes = 0
            self._follower.start()
            self._process = this_process()

    def _has(self, model: nn.Module, reads: Sequence[AnyReads]) -> bool:
        """Returns whether `model` is the served one or a part of it, with all the tables.

        Raises:
            ValueError: it is a part without some of the tables.
        """
        if not any(module is unwrapped(model) for module in unwrapped(self._model).modules()):
            return False
        if missing := set(self.reads) - set(reads):
            raise ValueError(
                f"this module is served together with {len(missing)} other modules, since all of "
                f"them change at once ({sorted(self.modules)}): give the whole model"
            )
        return True

    def _give_way(self, reads: Sequence[AnyReads]) -> None:
        """Ends, for one that has these tables and more of the model. The follower goes on for what
        was published here.

        Raises:
            ValueError: some tables are not among these; or there are more, and the versions of
                these have gone on without them.
        """
        has_history = self.publisher.versions.serial > 1 or self.weights.rank in (
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
        unwrapped(self._model).__dict__.pop(_SERVED, None)
        self._pins.forget_before(sys.maxsize)  # a lookup that still runs refers to its own
        self._follower.after_look = nothing

    def prefix_within(self, model: nn.Module) -> str:
        """Returns the prefix in the served model of the names of `model`, which is it or a part of
        it."""
        [prefix] = [
            f"{name}." if name else ""
            for name, module in unwrapped(self._model).named_modules()
            if module is unwrapped(model)
        ]
        return prefix

    def known_dense(self, model: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those of some dense weights that the served model has. Tables that are among them
        stay, so that they are refused.

        Args:
            model: the served model, or a part of it.
            given: weights by their names in a state dict of `model`.
        """
        prefix, tables = self.prefix_within(model), tuple(self.publisher.tables)
        known = self._dense.current().keys()
        whole = {name: f"{prefix}{name}" for name in given}
        return {
            name: value
            for name, value in given.items()
            if whole[name] in known or whole[name].startswith(tables)
        }

    def whole(self, model: nn.Module, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a state dict or checkpoint of `model`, which is the served model or a part of it,
        as one of the served model. Dense weights outside of the part stay as they are."""
        prefix = self.prefix_within(model)
        dense = self._dense.current() if prefix else {}
        outside = {name: live for name, live in dense.items() if not name.startswith(prefix)}
        if isinstance(state_dict, CheckpointWeights):
            return state_dict.of_part(prefix, outside)
        return outside | {f"{prefix}{name}": value for name, value in state_dict.items()}

    def _before_batch(self, *_: Any) -> None:
        if is_compiling():
            self._enter_uncompiled()
        else:
            self.enter(sys._getframe(1))

    def _after_batch(self, *_: Any) -> None:
        if is_compiling():
            self._leave_uncompiled()
        else:
            self.leave()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter_uncompiled(self) -> None:
        frame = sys._getframe()
        while frame.f_back is not None and _is_on_the_way(frame):
            frame = frame.f_back
        self.enter(frame)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _leave_uncompiled(self) -> None:
        self.leave()

    def leave(self) -> None:
        """Ends the forward that this thread entered last."""
        self._switches.gate.leave()

    def enter(self, frame: FrameType) -> None:
        """Begins a forward that runs as long as `frame`, with the version that serves.

        Args:
            frame: a frame that runs as long as the forward.

        Raises:
            PeerTimeoutError: that one can't be mapped, or see Switches.take_newest.
            ValueError: see Switches.take_newest.
            RendezvousError: this process can't pin anything, see Reader.pin.
        """
        if not self._process.is_own:
            self._begin_in_child()
        switches = self._switches
        if switches.gate.enter(frame):
            return
        if self._follower.newest is not switches.settled:
            self._go_over(frame)
        taken, pins = switches.taken[0], self._pins
        if taken.side is not None:
            if pins.ready is taken:
                pins.is_used = True
            else:
                self._pin(frame)

    @contextmanager
    def rows_kept(self) -> Iterator[None]:
        """Returns a context of a forward that has entered. The rows of its version stay as they are
        until the GPU has read what is launched there.

        Raises:
            BLSError: see DirectReads.pinned.
        """
        pins = [(reads, reads.pinned(reads.generation)) for reads in self.reads]
        try:
            yield
        finally:
            for reads, pin in pins:
                reads.keep_until_read(pin)
            pins.clear()  # an exception that somebody keeps would keep them
            del reads, pin

    def dense_places(self) -> dict[str, int]:
        """Returns the addresses of the dense weights by name."""
        return {name: place for name, (place, _) in self._dense.mark().items()}

    def _go_over(self, frame: FrameType) -> None:
        """Has a forward leave, and enter again with the version that serves."""
        switches = self._switches
        is_ready = False
        while not is_ready:
            switches.gate.leave()
            switches.take_newest()
            switches.gate.enter(frame)
            is_ready = not switches.is_half_done  # yet newer weights may wait for the next batch
        self._pins.forget_before(switches.taken[0].serial)

    def _pin(self, frame: FrameType) -> None:
        """Keeps the rows of a version as they are until the forward that has entered ends. If they
        are written over by now, the forward goes over to the version that serves.

        Raises:
            PeerTimeoutError: that one can't be mapped, or see Switches.take_newest.
            ValueError: see Switches.take_newest.
            RendezvousError: this process can't pin anything, see Reader.pin.
        """
        switches, follower = self._switches, self._follower
        while (taken := switches.taken[0]).side is not None:
            is_newest = follower.newest[0] is taken and not follower.problem
            if self._pins.hold(taken, is_newest=is_newest):
                return
            switches.gate.leave()
            follower.await_later(taken.serial, _LONGEST_WAIT)
            self._go_over(frame)
            if switches.taken[0] is taken:  # the model refuses what serves
                switches.gate.leave()
                raise ValueError(switches.problem)

    def _after_look(self) -> None:
        try:
            self._switch_pins()
        finally:  # an idle reader keeps no owner waiting
            for reads in self.reads:
                if reads.under_way is not None:
                    reads.under_way.let_go()

    def _switch_pins(self) -> None:
        newest, taken = self._follower.newest[0].serial, self._switches.taken[0].serial
        if 0 < self._pins.held[0] < taken:  # a switch was interrupted before it could
            self._pins.forget_before(taken)
        # A version that can't be mapped here is there as well: its owner may wait for this side.
        self._pins.let_go(newest + 1 if self._follower.problem else newest)
        self._switches.follow_drained()

    def take_newest(self) -> None:
        """Changes to the version that serves, in a process without batches.

        Raises:
            PeerTimeoutError: see Switches.take_newest.
            ValueError: see Switches.take_newest.
        """
        if self._follower.newest is not self._switches.settled:
            self._switches.take_newest()
            self._pins.forget_before(self._switches.taken[0].serial)

    def give_up(self, deadline: float) -> None:
        """Makes this process one that only reads. Another one may publish its tables then.

        Args:
            deadline: seconds to wait for a thread that publishes.

        Raises:
            PeerTimeoutError: the thread has not finished by then.
        """
        with self.publisher.one_at_a_time(time.monotonic() + deadline):
            rank = self.reads[0].rank
            for reads in self.reads:
                reads.rank = None
            self.weights.give_up_copies()
            if rank is not None:
                self.publisher.give_up(rank)

    def snapshot(self) -> tuple[tuple[Generation, ...], Mapping[str, Any]]:
        """Returns what is served now: the tables of each module, and the dense state that belongs
        to them."""
        return self._switches.snapshot()

    @contextmanager
    def failures_counted(self) -> Iterator[None]:
        """Counts a publication that fails in this context."""
        try:
            yield
        except Exception:
            with self._counting:
                self._failed_publishes += 1
            raise

    def standing(self) -> Standing:
        """Returns what whoever runs batches has to know ten times a second: a part of `state` that
        looks at no process."""
        taken = self._switches.taken[0]
        serial, _ = self.publisher.versions.serving
        return Standing(taken.serial < serial, taken.drained_for)

    def state(self) -> ServingState:
        """Returns what is served, and which processes read it or are gone."""
        tables = self.reads[0].tables
        checks = [module.input_check for module in self.modules.values()]
        serial, announced = self.publisher.versions.serving
        pending = self.publisher.versions.pending()
        taken, readers = self._switches.taken, readers_of(tables.page)
        # Nobody has published what the ranks had loaded before their first forward.
        facts = None if taken[0].version == FIRST_VERSION else PublicationFacts.of(taken)
        return ServingState(
            rank=self.weights.rank,
            version=taken[0].version,
            serial=taken[0].serial,
            published=None if facts is None else facts.published,
            age=None if facts is None else max(0.0, time.time() - facts.published),
            trained=None if facts is None else facts.trained,
            publish_seconds=None if facts is None else facts.seconds,
            bytes_written=None if facts is None else facts.bytes_written,
            bytes_reused=None if facts is None else facts.bytes_reused,
            announced=announced,
            announced_serial=serial,
            pending=pending,
            missing=tuple(sorted(set(range(tables.owners)) - pending.keys())) if pending else (),
            owners=tables.owners,
            owners_gone=tuple(self.publisher.owners_gone()),
            readers=tuple(readers),
            readers_behind={pid: oldest for pid, oldest in readers.items() if oldest < serial},
            uncounted=not self._follower.reader.is_counted,
            failed_publishes=self._failed_publishes,
            drained_for=taken[0].drained_for,
            problem=self._problem(),
            rows_read=tuple(torch.stack([each.rows_read for each in self.reads]).sum(0).tolist()),
            refused_batches=sum(check.refused_batches for check in checks),
            replaced_ids=sum(check.replaced_ids for check in checks),
            small_page_bytes=sum(
                piece.segment.small_page_bytes
                for reads in self.reads
                for part in reads.generation.parts
                for piece in part.pieces
            ),
        )

    def _problem(self) -> str:
        behind = [reads.live.behind for reads in self.reads if reads.live is not None]
        return next(filter(None, [self.publisher.problem, self._switches.problem, *behind]), "")


def _is_on_the_way(frame: FrameType) -> bool:
    """Returns whether a frame ends before the forward whose hook it is a part of."""
    file = frame.f_code.co_filename
    return file == __file__ or "/torch/_dynamo/" in file


# Served models by the identity of each of their direct reads, which they keep.
_served: "weakref.WeakValueDictionary[int, ServedModel]" = weakref.WeakValueDictionary()


def _served_with(reads: AnyReads) -> ServedModel | None:
    return _served.get(id(reads))

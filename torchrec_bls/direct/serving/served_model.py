"""One process's side of a model whose tables are read directly, and of its generations."""

import sys
import threading
import time
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torchrec.distributed import DistributedModelParallel

from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.holders import is_alive, pid_of
from torchrec_bls.direct.new_weights import prefix_of
from torchrec_bls.direct.reads.attached_collection import AttachedCollection
from torchrec_bls.direct.reads.direct_reads import DirectReads
from torchrec_bls.direct.serving.dense_state import DenseState
from torchrec_bls.direct.serving.publisher import Publication, Publisher
from torchrec_bls.direct.serving.serving_state import ServingState
from torchrec_bls.direct.serving.switches import Switches
from torchrec_bls.distributed.exchanged_module import ExchangedModule
from torchrec_bls.distributed.outputs.inference_mode import outside_inference_mode
from torchrec_bls.pipeline import bounded_lag_modules

ReadingModule = ExchangedModule | AttachedCollection

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
        self.publisher = Publisher(
            {
                prefix_of(name, reads.form.pooled): reads.tables
                for name, reads in zip(self.modules, self.reads, strict=True)
            },
            [reads.generation for reads in self.reads],
        )
        self._follower = self.publisher.follower
        self._dense = DenseState(_unwrapped(model), self.modules.values())
        self._switches = Switches(
            self.reads, self._dense, self._follower.newest, self._published_dense
        )
        # Dense states by generation, as this process has published them.
        self._published: dict[int, dict[str, Any]] = {}
        self._readers: list[int] = []
        self._hooks = [
            _unwrapped(model).register_forward_pre_hook(self._before_batch),
            _unwrapped(model).register_forward_hook(self._after_batch, always_call=True),
        ]
        self._switches.gate.admit_running(_unwrapped(model))

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
                for hook in served._hooks:
                    hook.remove()
            kept[_SERVED] = made = cls(model)
            return made

    def _is_current(self) -> bool:
        modules = reading_modules(self._model).values()
        return [id(module.direct_reads) for module in modules] == list(map(id, self.reads))

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
        """Begins a forward that runs as long as `frame`, with the newest generation."""
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
        """Changes to the newest generation, in all modules or, if that fails, in none."""
        switches = self._switches
        with switches.gate.lock:
            before = switches.taken
            switches.take(self._follower.newest, _LONGEST_FORWARD)
            for number in list(self._published):
                if number <= switches.taken[0].number:
                    self._published.pop(number, None)
        if switches.taken is not before:
            self._follower.release(before)

    def _published_dense(self, newest: Generation) -> Mapping[str, Any] | None:
        """Returns the dense state of a generation, or None if there is none."""
        own = self._published.get(newest.number)
        if own is not None:
            return own
        given = self.publisher.dense_weights(newest)  # another process published it
        if given is not None:
            self._dense.check(given, f"generation {newest.number}")
        return given

    def snapshot(self) -> tuple[tuple[Generation, ...], dict[str, Any]]:
        """Returns what is served now: the tables of each module, and a copy of the dense weights by
        name."""
        with self._switches.gate.lock:
            self._switches.finish(_LONGEST_FORWARD)
            return self._switches.taken, self._dense.copy()

    def add_reader(self, identity: int) -> None:
        """Notes that a process has attached to this one."""
        self._readers = [each for each in self._readers if is_alive(each)] + [identity]

    def state(self) -> ServingState:
        """Returns what is served, and which owners are gone."""
        tables = self.reads[0].tables
        checks = [module.input_check for module in self.modules.values()]
        return ServingState(
            rank=self.rank,
            generation=self._switches.taken[0].number,
            announced=self.publisher.announced,
            owners=tables.owners,
            owners_gone=tuple(self.publisher.owners_gone()),
            readers=tuple(pid_of(each) for each in self._readers if is_alive(each)),
            problem=self._problem(),
            rows_read=tuple(torch.stack([each.rows_read for each in self.reads]).sum(0).tolist()),
            refused_batches=sum(check.refused_batches for check in checks),
            replaced_ids=sum(check.replaced_ids for check in checks),
        )

    def _problem(self) -> str:
        behind = [reads.live.behind for reads in self.reads if reads.live is not None]
        return next(filter(None, [self._follower.problem, self._switches.problem, *behind]), "")

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
            if state_dict is None:
                self._show_newest(number - 1, end)
            # No switch changes tensors while another thread looks at them.
            with self._switches.gate.lock:
                self._refuse_strangers()
                writes = self._writes()
                dense = self._dense.new(self._dense.current() if state_dict is None else state_dict)
                if state_dict is None:
                    parts = [reads.live.storages() for reads in self.reads if reads.live]
                    segments = self.publisher.create(rank, number, parts, dense)
                    self._switches.published_in_place()
            if state_dict is not None:
                parts = self.publisher.parts(rank, state_dict)
                segments = self.publisher.create(rank, number, parts, dense)
            self._published[number] = dense
            for reads, count in zip(self.reads, writes, strict=True):
                if reads.live is not None:
                    reads.live.published(count)
            self.publisher.announce(rank, number, segments)
        return Publication(number, self.publisher)

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

    def _show_newest(self, number: int, end: float) -> None:
        """Makes the weights show a generation that is complete already, so that none of it is lost.

        Raises:
            ValueError: they were written to before, and the writes would mix with it. Or the model
                refuses it.
            PeerTimeoutError: the generation can't be mapped.
        """
        self.publisher.wait_for(number, max(0.0, end - time.monotonic()))
        switches = self._switches
        if self._follower.newest is not switches.taken or switches.is_half_done:
            with switches.gate.lock:
                would_lose_writes = switches.would_lose_writes
            if would_lose_writes:
                raise ValueError(
                    f"the weights were written to while they show generation "
                    f"{switches.taken[0].number}, but generation {number} is complete. Give all "
                    "weights as a state_dict, e.g. publish(model, model.state_dict())"
                )
            self._switch()
            if switches.taken[0].number < number:
                raise ValueError(
                    f"the weights show generation {switches.taken[0].number}, but generation "
                    f"{number} is complete, and can't be taken: {switches.problem}"
                )
        with switches.gate.lock:
            for reads in self.reads:
                reads.show_served()

    def publish_for(
        self, owner: int, state_dict: Mapping[str, Any] | None, deadline: float
    ) -> Publication:
        """Publishes the part of a rank that is gone; see the function `publish`."""
        dense = None
        with self._switches.gate.lock:
            if state_dict is not None and self._dense.current().keys() <= state_dict.keys():
                dense = self._dense.new(state_dict)
        return self.publisher.publish_for(owner, state_dict, dense, deadline)


def _is_on_the_way(frame: FrameType) -> bool:
    """Returns whether a frame ends before the forward whose hook it is a part of."""
    file = frame.f_code.co_filename
    return file == __file__ or "/torch/_dynamo/" in file


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

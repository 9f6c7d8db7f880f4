"""Publishes the weights of a model: new ones, or those that it has."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torchrec_bls.direct.new_weights import named_source, trained_at
from torchrec_bls.direct.owner_part import OwnerPart
from torchrec_bls.direct.reads.direct_reads import AnyReads
from torchrec_bls.direct.serving.dense_state import DenseState
from torchrec_bls.direct.serving.dense_versions import DenseVersions
from torchrec_bls.direct.serving.draining import Draining, outcome_told
from torchrec_bls.direct.serving.probe import Probe, Trial, check_is_probe
from torchrec_bls.direct.serving.publisher import Publication, Publisher
from torchrec_bls.direct.serving.reading_modules import ReadingModule
from torchrec_bls.direct.serving.row_publisher import Dense, RowPublisher
from torchrec_bls.direct.serving.switches import Switches
from torchrec_bls.direct.serving.versions import PAUSE
from torchrec_bls.errors import PeerTimeoutError


class WeightsPublisher:
    """Publishes tables and dense state together, so that a model changes to them together.

    Args:
        modules: modules that read tables, by name.
        reads: direct reads of each module.
        publisher: publisher of the tables.
        dense: dense state of the model.
        dense_versions: dense state of each version.
        switches: switches of the model, which show what serves.
        trial: trial of versions that are not announced yet.
    """

    def __init__(
        self,
        modules: Mapping[str, ReadingModule],
        reads: Sequence[AnyReads],
        publisher: Publisher,
        dense: DenseState,
        dense_versions: DenseVersions,
        switches: Switches,
        trial: Trial,
    ) -> None:
        self._modules = dict(modules)
        self._reads = list(reads)
        self._publisher = publisher
        self._dense = dense
        self._dense_versions = dense_versions
        self._switches = switches
        self._trial = trial
        self._draining = Draining(publisher, switches)
        self._rows = RowPublisher(publisher)

    @property
    def rank(self) -> int | None:
        """Returns the rank whose tables this process publishes; None where it only reads, as a
        forked child does."""
        reads = self._reads[0]
        return reads.rank if reads.tables.process.is_own else None

    def publish(
        self,
        version: str | None,
        state_dict: Mapping[str, Any] | None,
        deadline: float,
        probe: Probe | None = None,
        drain: bool = False,
    ) -> Publication:
        """Publishes this rank's part; see the function `publish`."""
        rank, end = self._own_rank(), time.monotonic() + deadline
        if state_dict is None and any(reads.live is None for reads in self._reads):
            raise ValueError(
                f"the tables of rank {rank} were not loaded in this process, which has attached to "
                "them: give their new weights as a state_dict"
            )
        if probe is not None:
            self._refuse_probe(probe, state_dict)
        if drain:
            self._refuse_drain(state_dict)
        version = self._publisher.named(version)
        with self._publisher.one_at_a_time(end):
            # What can't be published is refused before anything is withdrawn for it.
            with named_source(state_dict):
                contents = (
                    None if state_dict is None else self._publisher.contents(rank, state_dict)
                )
                dense = self._new_dense(state_dict)
            serial, is_new = self._publisher.clear_way(rank, version, end)
            if not is_new:
                if state_dict is not None:
                    self._switches.replace_writes(version)
                return Publication(version, True, rank, serial, self._publisher, [])
            self._rows.forget()  # its pieces are others
            before = None
            if drain and contents is not None:
                with named_source(state_dict):
                    before = self._draining.drain(rank, version, contents, deadline)
                serial = self._publisher.versions.serial + 1
            self._dense_versions.drop(serial)
            self._publisher.follower.drop(rank, serial)
            if contents is None:
                self._show_served(serial - 1, end)
            # No switch changes tensors while another thread looks at them.
            with self._switches.gate.lock:
                writes = self._writes()
                if contents is None:
                    self._refuse_empty()
                    dense = self._new_dense_inside(None)
                    live = [reads.live_content() for reads in self._reads]
                    parts = self._publisher.create(rank, version, live, dense)
                    self._switches.published_in_place()
            with outcome_told(self._publisher):
                if contents is not None:
                    with named_source(state_dict):
                        trained = trained_at(state_dict)
                        parts = self._publisher.create(
                            rank, version, contents, dense, before, trained
                        )
                if probe is not None:
                    self._try(probe, version, serial, parts, dense)
            self._dense_versions.keep(serial, version, dense)
            for reads, count in zip(self._reads, writes, strict=True):
                if reads.live is not None:
                    reads.live.published(count)
            self._publisher.announce(rank, serial, version, parts, end)
        return Publication(version, False, rank, serial, self._publisher, parts)

    def publish_rows(
        self,
        version: str,
        base: str,
        rows: Mapping[str, Any],
        dense: Mapping[str, Any] | None,
        probe: Probe | None,
        trained: float | None,
        deadline: float,
    ) -> Publication:
        """Publishes some rows; see the function `publish_rows`."""
        self._own_rank()
        if probe is not None:
            check_is_probe(probe)
        owners = self._reads[0].tables.owners
        if owners > 1:
            raise ValueError(
                f"rows are written by the one process that has all tables, but {owners} ranks "
                "publish parts of these: publish from one process, see keeper()"
            )
        if any(reads.live is not None for reads in self._reads):
            raise ValueError(
                "the weights of this model show its tables, which must not change under them: "
                "publish from a process that shows none, see keeper()"
            )

        def dense_after(before: Dense) -> Dense:
            # What a whole version of this number has left here that failed is of no other version.
            self._dense_versions.drop(self._publisher.versions.serial + 1)
            return before if dense is None else self._changed_dense(base, before, dense)

        def check(serial: int, parts: Sequence[OwnerPart], new: Dense) -> None:
            if probe is not None:
                state = self._new_dense(None) if new is None else new
                self._try(probe, version, serial, parts, state)

        return self._rows.publish(version, base, rows, dense_after, check, trained, deadline)

    def give_up_copies(self) -> None:
        """Lets go of the copies of tables that got rows, for a process that publishes no more."""
        self._rows.forget()

    def _own_rank(self) -> int:
        """Returns the rank whose tables this process publishes.

        Raises:
            ValueError: it publishes none.
        """
        self._refuse_in_child()
        if self.rank is None:
            raise ValueError(
                "this process reads the tables of others and publishes none: attach(owner=...) in "
                "the place of a rank that is gone, or publish(owner=...) on its behalf"
            )
        return self.rank

    def _try(
        self,
        probe: Probe,
        version: str,
        serial: int,
        parts: Sequence[OwnerPart],
        dense: Mapping[str, Any],
    ) -> None:
        """Raises ValueError if a version that nobody knows yet does not pass its probe."""
        generations = self._publisher.generations(version, serial, parts)
        self._trial.check(probe, version, generations, dense)

    def _refuse_probe(self, probe: Probe, state_dict: Mapping[str, Any] | None) -> None:
        check_is_probe(probe)
        owners = self._reads[0].tables.owners
        if owners > 1:
            raise ValueError(
                f"a probe needs all tables of a version, but {owners} ranks publish parts of this "
                "one: publish it from one process that has all tables, see keeper()"
            )
        if state_dict is None:
            raise ValueError(
                "weights that were written in place can't be given up if they do not pass a probe: "
                "give new ones as a state_dict"
            )

    def _refuse_drain(self, state_dict: Mapping[str, Any] | None) -> None:
        owners = self._reads[0].tables.owners
        if owners > 1:
            raise ValueError(
                f"drain=True has all processes let go of all tables, but {owners} ranks publish "
                "parts of them, each at its own time: publish from one process that has all "
                "tables, see keeper()"
            )
        if state_dict is None:
            raise ValueError(
                "weights that were written in place would be lost when the tables are drained: "
                "give new ones as a state_dict or checkpoint"
            )

    def _refuse_empty(self) -> None:
        if self._switches.taken[0].drained_for:
            raise ValueError(
                "the weights of this model show no rows, since the tables are drained: give new "
                "ones as a state_dict or checkpoint"
            )

    def _new_dense(self, state_dict: Mapping[str, Any] | None) -> dict[str, Any]:
        with self._switches.gate.lock:
            return self._new_dense_inside(state_dict)

    def _new_dense_inside(self, state_dict: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns a copy of new dense weights, or of those of this moment."""
        self._refuse_strangers()
        return self._dense.new(self._dense.current() if state_dict is None else state_dict)

    def _changed_dense(self, base: str, before: Dense, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a copy of the dense weights of a version, of which some are new."""
        if before is None:
            raise ValueError(
                f"version {base!r} was published without dense weights, so that those which are "
                "not given are unknown: publish a whole version first"
            )
        with self._switches.gate.lock:
            if unknown := sorted(given.keys() - self._dense.current().keys()):
                raise ValueError(
                    f"the model has no dense weights {unknown}: give them by their names in its "
                    "state dict, and those of tables as rows"
                )
            return self._dense.new({**before, **given})

    def _writes(self) -> list[int]:
        return [0 if reads.live is None else reads.live.writes() for reads in self._reads]

    def _refuse_strangers(self) -> None:
        """Raises ValueError if a table's parameter shows something else than the table."""
        for (name, module), reads in zip(self._modules.items(), self._reads, strict=True):
            shown = reads.shown_by(module, name)  # type: ignore[arg-type]
            if reads.live is not None and (strangers := reads.live.strangers(shown)):
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
        while self._publisher.follower.newest[0].serial < serial:
            if time.monotonic() >= end:
                why = self._publisher.follower.problem or "it is still being mapped"
                raise PeerTimeoutError(f"the version that serves can't be shown here: {why}")
            time.sleep(PAUSE)
        switches = self._switches
        if self._publisher.follower.newest != switches.taken or switches.is_half_done:
            with switches.gate.lock:
                would_lose_writes = switches.would_lose_writes
            shown, serving = switches.taken[0].version, self._publisher.follower.newest[0].version
            if would_lose_writes:
                raise ValueError(
                    f"the weights were written to while they show version {shown!r}, but "
                    f"{serving!r} serves. Give all weights as a state_dict, e.g. publish(model, "
                    "model.state_dict(), version=...)"
                )
            switches.take_newest()
            if switches.taken[0].serial < serial:
                raise ValueError(
                    f"the weights show version {shown!r}, but {serving!r} serves, and can't be "
                    f"taken: {switches.problem}"
                )
        with switches.gate.lock:
            for reads in self._reads:
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
                with named_source(state_dict):
                    dense = self._dense.new(state_dict)
        version = self._publisher.named(version)
        return self._publisher.publish_for(owner, version, state_dict, dense, deadline)

    def _refuse_in_child(self) -> None:
        process = self._reads[0].tables.process
        if not process.is_own:
            raise ValueError(
                f"this process was forked from process {process.pid}, and reads its tables: "
                "publish there. In the place of a rank that is gone, call attach(owner=...) with a "
                "new model; a forked child may do that as well"
            )

"""Publishes the checkpoints and deltas that come into a directory."""

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from torchrec_bls.checkpoints import DELTA_SUFFIX
from torchrec_bls.collective.transport.deadlines import check_deadline
from torchrec_bls.direct.arguments import DRAINED_VERSION
from torchrec_bls.direct.keeping.checkpoint_weights import (
    Order,
    opened,
    order_of,
    version_of_checkpoint,
)
from torchrec_bls.direct.keeping.found_delta import FoundDelta
from torchrec_bls.direct.process import this_process
from torchrec_bls.direct.serving.probe import Probe, check_is_probe
from torchrec_bls.direct.serving.publishing import publish, publish_rows
from torchrec_bls.direct.serving.served_model import ServedModel
from torchrec_bls.errors import PeerTimeoutError, named
from torchrec_bls.lifetime import Living, When, at_exit, do_all

_log = logging.getLogger(__name__)
# Seconds that the thread may take to end: when it is closed, and at the end of the process. A
# publication that takes longer is left to itself.
_LONGEST_PUBLICATION, _ENDING = 60.0, 5.0

# A checkpoint that may be complete, with its order.
_Ordered = tuple[Order, Path]


@dataclass(frozen=True)
class FoundCheckpoint:
    """A complete checkpoint.

    Attributes:
        path: its file or folder.
        version: name of the version that it makes, which has its identity.
        order: its order among others, the newest last.
    """

    path: Path
    version: str
    order: Order


class Watch:
    """Looks for new checkpoints until it is closed, or what it publishes for is collected. `watch`
    returns it. It is a context manager.

    Args:
        owner: model or keeper.
        publish_checkpoint: function that publishes a checkpoint for `owner`.
        publish_delta: function that publishes a delta for `owner`, on the version that serves.
        serving: function that returns the version that `owner` serves.
        directory: see `watch`.
        keep: see `watch`.
        pause: see `watch`.
        drain: see `watch`.

    Attributes:
        directory: see `watch`.
        published: the last `keep` checkpoints that were published here, the newest last. The one
            before the last is what `roll_back` publishes.
        problem: why the newest complete checkpoint or delta is not served; empty if it is, or there
            is none.
        failed: how many publications have failed.
    """

    def __init__(
        self,
        owner: Any,
        publish_checkpoint: Callable[[Any, FoundCheckpoint], None],
        publish_delta: Callable[[Any, FoundDelta, str], None],
        serving: Callable[[Any], str],
        directory: str,
        keep: int,
        pause: float,
        drain: bool,
    ) -> None:
        self.directory = directory
        self.published: list[FoundCheckpoint] = []
        self.problem = ""
        self.failed = 0
        self._process = this_process()
        self._owner = weakref.ref(owner, self._end)
        self._publish = publish_checkpoint
        self._publish_delta = publish_delta
        self._serving = serving
        self._keep = keep
        # Errors that come again until the files change. Or each try would drain the readers.
        self._lasting = (ValueError, PeerTimeoutError) if drain else (ValueError,)
        # What was published here last, or was found to serve.
        self._newest: FoundCheckpoint | FoundDelta | None = None
        # What can't be published, by version or identity, with the reason: until its files change.
        self._refused: dict[str, str] = {}
        # The complete deltas at the last look, by path.
        self._deltas: dict[Path, FoundDelta] = {}
        # What was logged of each path last.
        self._said: dict[str, str] = {}
        self._looking = threading.Lock()
        self._ends = threading.Event()
        self._thread = threading.Thread(
            target=self._look_on, args=(pause,), name="torchrec_bls watch", daemon=True
        )
        _watches.add(self)
        self._thread.start()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def look(self) -> bool:
        """Looks once. Publishes the newest checkpoint that can be, if it is newer than what was
        published here, and then the deltas that lead on from what serves. Returns whether it has
        published anything."""
        with self._looking:
            try:
                return self._look()
            except Exception as error:  # the directory can't be read, for example
                self.problem = f"{self.directory}: {named(error)}"
                self._say(logging.WARNING, self.directory, self.problem)
                return False

    def roll_back(self) -> str:
        """Publishes the checkpoint before the last one that was published here, and returns its
        version. Only a checkpoint that is newer than all so far is published afterwards, and then
        deltas of it. Until then newer deltas are a problem, which is told.

        Raises:
            ValueError: there is none before, its files have changed, or it can't be published.
            RendezvousError: there is no memory for two versions.
            PeerTimeoutError: see `publish`.
        """
        owner = self._owner()
        with self._looking:
            if owner is None or len(self.published) < 2:
                raise ValueError(
                    f"{len(self.published)} checkpoints of {self.directory} were published here, "
                    "and none before the last one is remembered: publish one by its path"
                )
            before = self.published[-2]
            if version_of_checkpoint(before.path) != before.version:
                raise ValueError(
                    f"{before.path} has changed since it was published as {before.version!r}: "
                    "publish it by its path"
                )
            self._publish(owner, before)
            self.published.pop()
            return before.version

    def close(self) -> None:
        """Looks for no more checkpoints. What is being published is waited for, for a minute. In a
        forked child it does nothing."""
        if not self._process.is_own:
            return
        self._end()
        self.join(_LONGEST_PUBLICATION)

    def join(self, deadline: float) -> None:
        """Waits for the thread, which was told to end, for some seconds."""
        if self._thread is not threading.current_thread():
            self._thread.join(deadline)

    def _end(self, *_: object) -> None:
        self._ends.set()

    def _look_on(self, pause: float) -> None:
        while not self._ends.is_set():
            self.look()
            self._ends.wait(pause)

    def _look(self) -> bool:
        owner = self._owner()
        if owner is None:
            return False
        serving = self._serving(owner)
        checkpoints, deltas = self._found()
        if serving == DRAINED_VERSION:  # since one failed: the one before is better than none
            self._newest = None
        for delta in deltas:
            if delta.version == serving:  # of another process, or its predecessor
                self._newest = delta
        refused, self._refused = self._refused, {}
        has_published, problem = self._publish_newer(owner, checkpoints, refused)
        has_followed, gap = self._follow(owner, deltas, refused)
        self.problem = problem or gap
        return has_published or has_followed

    def _publish_newer(
        self, owner: Any, checkpoints: Sequence[_Ordered], refused: Mapping[str, str]
    ) -> tuple[bool, str]:
        """Publishes the newest checkpoint that can be. Returns whether there was one, and why it is
        not the newest of all."""
        serving, problem = self._serving(owner), ""
        for found in self._newer_ones(checkpoints):
            if found.version == serving:  # of another process, or its predecessor
                self._newest = found
                break
            publish = partial(self._publish, owner, found)
            why = self._why_not_published(
                found.path, found.version, publish, refused, self._lasting
            )
            if not why:
                self._newest = found
                before = [each for each in self.published if each.version != found.version]
                self.published = [*before, found][-self._keep :]
                return True, problem
            problem = problem or why
        return False, problem

    def _follow(
        self, owner: Any, deltas: Sequence[FoundDelta], refused: Mapping[str, str]
    ) -> tuple[bool, str]:
        """Publishes the deltas that lead on from what serves, one after the other. Returns whether
        there was one, and why newer ones are left."""
        rest, has_published, problem = list(deltas), False, ""
        while True:
            serving, newest = self._serving(owner), self._newest
            # What somebody else has published is no state that the files here lead on from.
            is_known = newest is None or newest.version == serving
            since = None if newest is None else newest.order
            for delta in [each for each in rest if is_known and each.follows(serving, since)]:
                publish = partial(self._publish_delta, owner, delta, serving)
                why = self._why_not_published(
                    delta.path, delta.identity, publish, refused, (ValueError,)
                )
                if not why:
                    break
                problem = problem or why
            else:
                return has_published, problem or self._gap(rest, serving)
            self._newest, has_published = delta, True
            rest.remove(delta)

    def _gap(self, deltas: Sequence[FoundDelta], serving: str) -> str:
        """Returns why the oldest of the deltas is left that are newer than what serves; empty if
        there are none."""
        applied = _applied(self._deltas.values(), serving)
        for delta in reversed(deltas):
            is_newer = self._newest is None or delta.order > self._newest.order
            if is_newer and delta not in applied:
                problem = (
                    f"{delta.path} is not published: it belongs on version {delta.base!r}, but "
                    f"{serving!r} serves, and no older files here lead from this one to that. The "
                    "next checkpoint is waited for"
                )
                self._say(logging.WARNING, str(delta.path), problem)
                return problem
        return ""

    def _why_not_published(
        self,
        path: Path,
        key: str,
        publish: Callable[[], None],
        refused: Mapping[str, str],
        lasting: tuple[type[Exception], ...],
    ) -> str:
        """Publishes what was found at a path, unless it was refused. Returns what keeps it from
        that; empty if nothing does. After `lasting` errors it is refused."""
        if key in refused:
            self._refused[key] = refused[key]
            return refused[key]
        try:
            publish()
        except Exception as error:
            self.failed += 1
            problem = f"{path} is not published: {named(error)}"
            if isinstance(error, lasting):
                self._refused[key] = problem
            self._say(logging.WARNING, str(path), problem)
            return problem
        return ""

    def _found(self) -> tuple[list[_Ordered], list[FoundDelta]]:
        """Returns what may be checkpoints, and the complete deltas, the newest first."""
        ordered = []
        paths = [each for each in Path(self.directory).iterdir() if not each.name.startswith(".")]
        known = {self.directory, *map(str, paths)}
        self._said = {path: text for path, text in self._said.items() if path in known}
        for path in paths:
            try:
                ordered.append((order_of(path), path))
            except OSError as error:  # it is being made, or deleted
                self._leave_out(path, error)
        ordered.sort(reverse=True)
        opened_before, self._deltas = self._deltas, {}
        for order, path in ordered:
            if path.suffix == DELTA_SUFFIX:
                delta = opened_before.get(path)
                try:
                    if delta is None or delta.order != order:
                        delta = FoundDelta.at(path, order)
                except ValueError as error:  # it is being written, or copied
                    self._leave_out(path, error)
                else:
                    self._deltas[path] = delta
        checkpoints = [each for each in ordered if each[1].suffix != DELTA_SUFFIX]
        return checkpoints, list(self._deltas.values())

    def _newer_ones(self, checkpoints: Sequence[_Ordered]) -> Iterator[FoundCheckpoint]:
        """Yields the complete checkpoints that are newer than what was published, the newest
        first."""
        for order, path in checkpoints:
            if self._newest is not None and order <= self._newest.order:
                return
            try:
                found = FoundCheckpoint(path, version_of_checkpoint(path), order)
            except (OSError, ValueError) as error:  # it is being written
                self._leave_out(path, error)
            else:
                yield found

    def _leave_out(self, path: Path, error: Exception) -> None:
        self._say(logging.INFO, str(path), f"{path} is left out: {error}")

    def _say(self, level: int, path: str, text: str) -> None:
        """Logs a text about a path once."""
        if self._said.get(path) != text:
            self._said[path] = text
            _log.log(level, "%s", text)


def _applied(deltas: Iterable[FoundDelta], version: str) -> list[FoundDelta]:
    """Returns the deltas that have led to a version, the last one first."""
    by_version = {delta.version: delta for delta in deltas}
    applied = []
    while version in by_version:
        delta = by_version.pop(version)
        applied.append(delta)
        version = delta.base
    return applied


def watch(
    model: nn.Module,
    directory: str | os.PathLike[str],
    keep: int = 2,
    *,
    probe: Probe | None = None,
    drain: bool = False,
    pause: float = 5.0,
    deadline: float = 600.0,
) -> Watch:
    """Publishes the checkpoints and deltas that come into a directory, in a thread, while the model
    serves.

    Each child of the directory is a checkpoint, as soon as it is complete, or a delta if its name
    ends in `.delta`. The newest checkpoint is published, as a version that is named after it, if it
    is newer than what was published here. The time counts at which its last file was written; names
    count where times are equal. So a version is never replaced by an older one, whatever is
    deleted. A checkpoint that can't be published is logged once and tried again when its files
    change; the one before it is published if that is newer than what serves. Until then the old
    version serves. With `drain` a checkpoint that readers did not let go for is not tried again
    either, and the last one is published again if a newer one has left nothing to serve.

    A delta, which `DeltaWriter` writes, has the rows that have changed since its base. It is
    applied with `publish_rows` as soon as its base serves, and then deltas of that one. Its base is
    a version, or the name of a checkpoint's file or folder. That checkpoint must be older than the
    delta, since another one may have had its name. Deltas older than what serves are skipped. A
    newer one whose base nothing here leads to is logged once: the next checkpoint is waited for.
    Deltas drain nothing, and take memory for two copies of the tables.

    No file is ever deleted or changed.

    Args:
        model: model that has all tables, as for `publish` with one rank.
        directory: directory with the checkpoints and deltas. Names that begin with a dot are left
            out.
        keep: how many of the checkpoints that were published here are remembered. `Watch.roll_back`
            goes back to the one before the last.
        probe: see `publish`.
        drain: see `publish`.
        pause: seconds between two looks.
        deadline: seconds until a version must be mapped.

    Raises:
        ValueError: an argument is out of its range, or the model does not read all its tables
            directly.
    """
    check_watch(keep, probe, pause)
    check_deadline(deadline)
    ServedModel.of(model)

    def publish_checkpoint(served: nn.Module, found: FoundCheckpoint) -> None:
        with opened(found.path) as (weights, _):
            publish(
                served,
                weights,
                probe=probe,
                drain=drain,
                version=found.version,
                deadline=deadline,
            ).wait(deadline)

    def publish_delta(served: nn.Module, found: FoundDelta, base: str) -> None:
        rows, dense = found.read(served)
        publish_rows(
            served,
            rows,
            version=found.version,
            base=base,
            dense=dense,
            probe=probe,
            trained=found.trained,
            deadline=deadline,
        ).wait(deadline)

    def serving(served: nn.Module) -> str:
        return ServedModel.of(served).publisher.follower.newest[0].version

    path = os.fsdecode(directory)
    return Watch(model, publish_checkpoint, publish_delta, serving, path, keep, pause, drain)


def check_watch(keep: int, probe: Probe | None, pause: float) -> None:
    """Raises ValueError for arguments that no watch can have."""
    if type(keep) is not int or keep < 1:
        raise ValueError(f"keep is {keep!r}, but must be at least 1, the checkpoint that serves")
    if probe is not None:
        check_is_probe(probe)
    if not pause > 0:
        raise ValueError(f"pause is {pause!r} s between two looks, but must be positive")


_watches: Living[Watch] = Living()


@at_exit(When.OFFERS)
def _close_all() -> None:
    watches = list(_watches)
    do_all(each._end for each in watches)
    do_all(partial(each.join, _ENDING) for each in watches)

"""Publishes the checkpoints that come into a directory."""

import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from torchrec_bls.collective.transport.deadlines import check_deadline
from torchrec_bls.direct.arguments import DRAINED_VERSION
from torchrec_bls.direct.keeping.checkpoint_weights import (
    completed_at,
    opened,
    version_of_checkpoint,
)
from torchrec_bls.direct.process import this_process
from torchrec_bls.direct.serving.probe import Probe, check_is_probe
from torchrec_bls.direct.serving.publishing import publish
from torchrec_bls.direct.serving.served_model import ServedModel
from torchrec_bls.errors import PeerTimeoutError, named
from torchrec_bls.lifetime import Living, When, at_exit, do_all

_log = logging.getLogger(__name__)
# Seconds that the thread may take to end: when it is closed, and at the end of the process. A
# publication that takes longer is left to itself.
_LONGEST_PUBLICATION, _ENDING = 60.0, 5.0


# Checkpoints in the order of their times. Those of one time, which were unpacked together for
# example, are in the order of the numbers in their names.
_Order = tuple[int, list[int], str]


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
    order: _Order


class Watch:
    """Looks for new checkpoints until it is closed, or what it publishes for is collected. `watch`
    returns it. It is a context manager.

    Args:
        owner: model or keeper.
        publish_checkpoint: function that publishes a checkpoint for `owner`.
        serving: function that returns the version that `owner` serves.
        directory: see `watch`.
        keep: see `watch`.
        pause: see `watch`.
        drain: see `watch`.

    Attributes:
        directory: see `watch`.
        published: the last `keep` checkpoints that were published here, the newest last. The one
            before the last is what `roll_back` publishes.
        problem: why the newest complete checkpoint is not served; empty if it is, or there is none.
        failed: how many publications have failed.
    """

    def __init__(
        self,
        owner: Any,
        publish_checkpoint: Callable[[Any, FoundCheckpoint], None],
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
        self._serving = serving
        self._keep = keep
        # Errors that come again until the files change. Or each try would drain the readers.
        self._lasting = (ValueError, PeerTimeoutError) if drain else (ValueError,)
        self._newest: FoundCheckpoint | None = None
        # What can't be published, by version, with the reason: until its files change.
        self._refused: dict[str, str] = {}
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
        published here. Returns whether it has published one."""
        with self._looking:
            try:
                return self._look()
            except Exception as error:  # the directory can't be read, for example
                self.problem = f"{self.directory}: {named(error)}"
                self._say(logging.WARNING, self.directory, self.problem)
                return False

    def roll_back(self) -> str:
        """Publishes the checkpoint before the last one that was published here, and returns its
        version. Only a checkpoint that is newer than all so far is published afterwards.

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
        serving, problem = self._serving(owner), ""
        if serving == DRAINED_VERSION:  # since one failed: the one before is better than none
            self._newest = None
        refused, self._refused = self._refused, {}
        for found in self._newer_ones():
            if found.version == serving:  # of another process, or its predecessor
                self._newest = found
                break
            why = refused.get(found.version)
            if why is not None:
                self._refused[found.version] = why
            else:
                why = self._why_not_published(owner, found)
            if not why:
                self._newest = found
                before = [each for each in self.published if each.version != found.version]
                self.published = [*before, found][-self._keep :]
                self.problem = problem
                return True
            problem = problem or why
        self.problem = problem
        return False

    def _why_not_published(self, owner: Any, checkpoint: FoundCheckpoint) -> str:
        try:
            self._publish(owner, checkpoint)
        except Exception as error:
            self.failed += 1
            problem = f"{checkpoint.path} is not published: {named(error)}"
            if isinstance(error, self._lasting):
                self._refused[checkpoint.version] = problem
            self._say(logging.WARNING, str(checkpoint.path), problem)
            return problem
        return ""

    def _newer_ones(self) -> Iterator[FoundCheckpoint]:
        """Yields the complete checkpoints that are newer than what was published, the newest
        first."""
        ordered = []
        paths = [each for each in Path(self.directory).iterdir() if not each.name.startswith(".")]
        known = {self.directory, *map(str, paths)}
        self._said = {path: text for path, text in self._said.items() if path in known}
        for path in paths:
            try:
                ordered.append((order_of(path), path))
            except OSError as error:  # it is being made, or deleted
                self._leave_out(path, error)
        for order, path in sorted(ordered, reverse=True):
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
    """Publishes the checkpoints that come into a directory, in a thread, while the model serves.

    Each child of the directory is a checkpoint, as soon as it is complete. The newest one is
    published, as a version that is named after it, if it is newer than what was published here. The
    time counts at which its last file was written; names count where times are equal. So a version
    is never replaced by an older one, whatever is deleted. A checkpoint that can't be published is
    logged once and tried again when its files change; the one before it is published if that is
    newer than what serves. Until then the old version serves. With `drain` a checkpoint that
    readers did not let go for is not tried again either, and the last one is published again if a
    newer one has left nothing to serve.

    No file is ever deleted or changed.

    Args:
        model: model that has all tables, as for `publish` with one rank.
        directory: directory with the checkpoints. Names that begin with a dot are left out.
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

    def serving(served: nn.Module) -> str:
        return ServedModel.of(served).publisher.follower.newest[0].version

    return Watch(model, publish_checkpoint, serving, os.fsdecode(directory), keep, pause, drain)


def check_watch(keep: int, probe: Probe | None, pause: float) -> None:
    """Raises ValueError for arguments that no watch can have."""
    if type(keep) is not int or keep < 1:
        raise ValueError(f"keep is {keep!r}, but must be at least 1, the checkpoint that serves")
    if probe is not None:
        check_is_probe(probe)
    if not pause > 0:
        raise ValueError(f"pause is {pause!r} s between two looks, but must be positive")


def order_of(path: Path) -> _Order:
    """Returns the order of a checkpoint among others. Raises OSError if it has no files."""
    return completed_at(path), list(map(int, re.findall(r"[0-9]+", path.name))), path.name


_watches: Living[Watch] = Living()


@at_exit(When.OFFERS)
def _close_all() -> None:
    watches = list(_watches)
    do_all(each._end for each in watches)
    do_all(partial(each.join, _ENDING) for each in watches)

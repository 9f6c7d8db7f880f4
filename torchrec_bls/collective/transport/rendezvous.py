"""How the ranks of a process group meet to set up a channel: records through the group's store."""

import errno
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from torchrec_bls.errors import BLSError, RendezvousError, named

Record = Mapping[str, Any]
T = TypeVar("T")

# Key in place of a phase and a rank, where a rank that failed leaves word for all phases.
_FAILURE = ("failure", "any")
# Seconds of grace, after the deadline, before an unresponsive store is abandoned.
_GRACE = 0.5
# Seconds between two looks at what the other ranks have told; short at first.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.03
# Seconds that telling others of a failure may take. A store on a loaded host needs some of them.
# Only a store that hangs needs all.
_TELLING = 5.0
# Longest wait before Ctrl-C works. While gloo connects, the store's connection is taken.
_TELLING_OF_AN_INTERRUPT = 1.0


class Rendezvous:
    """Exchange of records among all ranks of a group, with a deadline.

    Args:
        group: the process group; its store carries the records.
        name: name of what is being set up; the same on every rank.
        deadline: seconds to wait for the other ranks in each exchange.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, deadline: float) -> None:
        self._name = name
        self._deadline = deadline
        self._rank = group.rank()
        self._world_size = group.size()
        self.group = group
        self._store = group.get_group_store()
        # A signal may end an exchange while its thread goes on: the failure must be told last.
        self._telling = threading.Lock()
        self._comes = True
        self._left = False
        self._prefix = ""
        self._last_key = ""

    def exchange(self, phase: str, record: Record) -> list[dict[str, Any]]:
        """Gives `record` to all ranks and returns all ranks' records, by rank.

        Raises:
            RendezvousError: ranks are missing at the deadline (the text names them), or another
                rank announced an error (the text quotes it), or a record of another form than
                `record`, or the store is gone.
        """
        end = time.monotonic() + self._deadline
        try:
            texts = within(self._deadline + _GRACE, lambda: self._exchange(phase, record, end))
        except TooLateError as error:
            raise RendezvousError(self._silent_store(phase)) from error
        except RendezvousError:
            raise
        except BaseException as error:  # from a signal's handler
            self._interrupted(phase, error)
            raise
        own = json.loads(texts[self._rank])
        return [self._parse(phase, rank, text, own) for rank, text in enumerate(texts)]

    def _parse(self, phase: str, rank: int, text: bytes, own: Any) -> dict[str, Any]:
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and "error" in record:
            raise self._failed(rank, record["error"])
        if not _same_form(record, own):
            raise RendezvousError(
                f"channel '{self._name}' on rank {self._rank}: rank {rank} announced "
                f"{text[:200]!r} in phase '{phase}', which has another form than this rank's "
                "record. Install one version of torchrec-bls on all ranks"
            )
        return dict(record)

    def _failed(self, rank: int, reason: str) -> RendezvousError:
        return RendezvousError(
            f"channel '{self._name}' on rank {self._rank}: rank {rank} could not set it up: "
            f"{reason}"
        )

    def _told_failure(self, text: bytes) -> RendezvousError:
        try:
            failure = json.loads(text)
            return self._failed(int(failure["rank"]), str(failure["error"]))
        except (ValueError, RecursionError, LookupError, TypeError):
            return RendezvousError(
                f"channel '{self._name}' on rank {self._rank}: a rank announced {text[:200]!r} as "
                "its failure. Install one version of torchrec-bls on all ranks"
            )

    @contextmanager
    def own_part(self, phase: str) -> Iterator[None]:
        """Surrounds the work that this rank has to do before it can come to `phase`. If the work
        fails, the others are told, and RendezvousError is raised here."""
        try:
            yield
        except (OSError, BLSError) as error:
            cure = ""
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                cure = ". Raise the limit of open files (ulimit -n)"
            reason = f"channel '{self._name}' on rank {self._rank}: {error}{cure}"
            reason += self._earlier_failure(phase)
            self.fail(phase, reason)
            raise RendezvousError(reason) from error
        except BaseException as error:
            self._interrupted(phase, error)
            raise

    def _interrupted(self, phase: str, error: BaseException) -> None:
        reason = f"channel '{self._name}' on rank {self._rank}: {named(error)}"
        self.fail(phase, reason, _TELLING_OF_AN_INTERRUPT)

    def own_store(self, phase: str) -> Store:
        """Returns a store that only the ranks of this channel have, for use in `phase`."""
        return PrefixStore(self._key(phase, "own"), self._store)

    def fail(self, phase: str, reason: str, telling: float = _TELLING) -> None:
        """Tells ranks that wait why this one does not come, in at most `telling` seconds. They wait
        in `phase` or already in a later one."""
        record = json.dumps({"error": reason})
        self._left = True  # a wait that goes on leaves the connection to `tell`

        def tell() -> None:
            self._tell(phase, record, comes=False)
            # Ranks that have read this rank's record of `phase` before look here.
            failure = json.dumps({"rank": self._rank, "error": reason})
            self._store.set(self._key(*_FAILURE), failure)

        # Without a store nobody waits.
        with suppress(RuntimeError, TooLateError):
            within(min(self._deadline, telling), tell)

    def _tell(self, phase: str, record: str, *, comes: bool) -> None:
        with self._telling:
            if self._comes:
                self._comes = comes
                self._store.set(self._key(phase, self._rank), record)

    def _earlier_failure(self, phase: str) -> str:
        """Says which other rank has failed already. What that rank set up is gone, and that may be
        the only fault here."""

        def look() -> str:
            for rank in range(self._world_size):
                key = self._key(phase, rank)
                if rank != self._rank and self._store.check([key]):
                    record = json.loads(self._store.get(key))
                    if isinstance(record, dict) and "error" in record:
                        return f". Before, rank {rank} could not set it up: {record['error']}"
            return ""

        with suppress(RuntimeError, TooLateError, ValueError, RecursionError):
            return within(min(self._deadline, _TELLING), look)
        return ""

    def _wait_for(self, keys: list[str], end: float) -> None:
        """Asks for one key after the other until all are there. It does not wait in the store,
        whose connection would then be taken: nothing could be told meanwhile.

        Raises:
            RendezvousError: a rank has failed before all came.
            RuntimeError: a key is missing at `end`, or this rank has told that it does not come.
        """
        pause = _SHORTEST_PAUSE
        failure_key = self._key(*_FAILURE)
        for key in keys:
            while not self._store.check([key]):
                if self._store.check([failure_key]):
                    # A rank may have come since the first question and failed in the next phase.
                    # That failure belongs to the next phase. So what this rank sees does not depend
                    # on which of the two comes first.
                    if self._store.check([key]):
                        break
                    raise self._told_failure(self._store.get(failure_key))
                if self._left or time.monotonic() >= end:
                    raise RuntimeError(f"{key} is missing")
                time.sleep(min(pause, max(0.0, end - time.monotonic())))
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _key(self, phase: str, rank: int | str) -> str:
        if not self._prefix:
            # Channels are created collectively, so that all ranks count the same. The store counts,
            # not the process: a restarted process would begin anew.
            base = f"torchrec_bls/{self._name}"
            self._prefix = f"{base}/{self._store.add(f'{base}/created/{self._rank}', 1)}"
        return f"{self._prefix}/{phase}/{rank}"

    def _exchange(self, phase: str, record: Record, end: float) -> list[bytes]:
        keys: list[str] = []
        try:
            self._tell(phase, json.dumps(record), comes=True)
            keys = [self._key(phase, rank) for rank in range(self._world_size)]
            # The store's time so far does not extend the deadline: the grace is only for asking who
            # is missing.
            self._wait_for(keys, end)
            texts = [self._store.get(key) for key in keys]
            self._forget_last(keys[self._rank])
            return texts
        except RendezvousError:
            raise
        except (RuntimeError, dist.DistError) as error:
            raise RendezvousError(self._explain(phase, keys)) from error

    def _forget_last(self, key: str) -> None:
        """Frees this rank's record of the phase before: all ranks in this phase have read it."""
        if self._last_key:
            with suppress(RuntimeError):  # from a store that keeps everything
                self._store.delete_key(self._last_key)
        self._last_key = key

    def _explain(self, phase: str, keys: list[str]) -> str:
        try:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        except RuntimeError:
            missing = []
        if not missing:
            return self._silent_store(phase)
        return (
            f"channel '{self._name}' on rank {self._rank}: ranks {missing} did not come to phase "
            f"'{phase}' within {self._deadline} s. Every rank of the group must create the channel "
            "(shard the module, run its first batch) in the same order"
        )

    def _silent_store(self, phase: str) -> str:
        return (
            f"channel '{self._name}' on rank {self._rank}: the process group's store does not "
            f"answer in phase '{phase}'. The process that hosts it (rank 0 or torchrun) has ended "
            "or is stuck: look at its output, and start the ranks again"
        )


class TooLateError(Exception):
    """A function did not return in time."""


def within(seconds: float, function: Callable[[], T]) -> T:
    """Returns `function()`. Raises TooLateError after `seconds`, and leaves the function's thread
    behind: with a store whose host hangs, the function cannot end otherwise. The same happens when
    a signal's handler raises, since its exception would otherwise wait for the function's
    return."""
    result: Future[T] = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=call, name="torchrec_bls rendezvous", daemon=True)
    thread.start()
    thread.join(seconds)
    if not result.done():
        raise TooLateError
    return result.result()


def _same_form(record: Any, own: Any) -> bool:
    """Returns whether two parsed records have the same fields and, throughout, the same types."""
    if type(record) is not type(own):
        return False
    if isinstance(own, dict):
        return record.keys() == own.keys() and all(_same_form(record[k], own[k]) for k in own)
    if isinstance(own, list):
        return len(record) == len(own) and all(map(_same_form, record, own))
    return True


def require_equal(name: str, records: list[dict[str, Any]], fields: Mapping[str, str]) -> None:
    """Checks that all ranks announced the same value of each field.

    Args:
        name: name of the channel, for the message.
        records: records by rank.
        fields: what the user has to change if a field differs, by the field's name.

    Raises:
        RendezvousError: ranks have different values; the text names the field, the ranks and the
            cure.
    """
    for field, cure in fields.items():
        ranks_by_value: dict[Any, list[int]] = defaultdict(list)
        for rank, record in enumerate(records):
            ranks_by_value[record[field]].append(rank)
        if len(ranks_by_value) > 1:
            values = "; ".join(f"ranks {r}: {v}" for v, r in ranks_by_value.items())
            raise RendezvousError(
                f"channel '{name}': {field} differs between ranks ({values}). {cure}"
            )


def host_identity() -> str:
    """Names the boot and PID namespace: they must be equal for two processes to share memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"

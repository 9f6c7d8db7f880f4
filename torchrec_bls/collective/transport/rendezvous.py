"""How the ranks of a process group meet to set up a channel: records through the group's store."""

import errno
import json
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchrec_bls.collective.transport.in_time import TooLateError, within
from torchrec_bls.collective.transport.meeting import (
    ForeignRecordError,
    Meeting,
    OtherRankFailedError,
)
from torchrec_bls.collective.transport.rank_names import RankNames, global_ranks
from torchrec_bls.errors import BLSError, RendezvousError, named

Record = Mapping[str, Any]

# Seconds of grace, after the deadline, before an unresponsive store is abandoned.
_GRACE = 0.5
# Seconds between two looks at what the other ranks have told; short at first.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.03
# Seconds that telling others of a failure may take. A store on a loaded host needs some of them.
# Only a store that hangs needs all.
_TELLING = 5.0
# Longest wait before Ctrl-C works. While gloo connects, the store's connection is taken.
_TELLING_OF_AN_INTERRUPT = 1.0

DEADLINE_NAME = "BLSConfig(deadline=...)"

# Names under which a thread of this process waits for the first records of the other ranks.
_meeting: set[tuple[str, str, int]] = set()


class Rendezvous:
    """Exchange of records among all ranks of a group, with a deadline.

    Each object is one try. A try that fails leaves nothing that a later one could take for its own:
    ranks that come late meet the others at their next try (docs/design/rendezvous.md).

    Args:
        group: the process group; its store carries the records.
        name: name of what is being set up; the same on every rank.
        deadline: seconds to wait for the other ranks in each exchange.
        deadline_name: the variable that sets the deadline, for messages; by default that of
            modules.
        session: session of an earlier rendezvous, if only those meet that have met there: a
            failure of another session is none here.

    Attributes:
        name: see above.
        names: names of the ranks.
        deadline_name: see above.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        deadline: float,
        deadline_name: str = DEADLINE_NAME,
        session: str = "",
    ) -> None:
        self.name = name
        self._deadline = deadline
        self.deadline_name = deadline_name
        self._rank = group.rank()
        self._group = group
        self.names = RankNames(global_ranks(group))
        self._where = f"channel '{name}' on {self.names.of(self._rank)}"
        self._store = group.get_group_store()
        self._meeting = Meeting(
            self._store,
            f"torchrec_bls/{name}",
            self._rank,
            group.size(),
            uuid.uuid4().hex,
            session,
            self.names,
        )
        # A signal may end an exchange while its thread goes on: the failure must be told last.
        self._telling = threading.Lock()
        self._has_met = False
        self._left = False
        self._stuck = False

    def exchange(self, phase: str, record: Record) -> list[dict[str, Any]]:
        """Gives `record` to all ranks and returns all ranks' records, by rank. All ranks get them,
        or all ranks that have come raise.

        Raises:
            RendezvousError: ranks are missing at the deadline (the text names them), or another
                rank announced an error (the text quotes it), or a record of another form than
                `record`, or the store is gone.
        """
        if self._has_met:
            return self._exchange(phase, record)
        key = (self._group_name(), self.name, self._rank)
        if key in _meeting:
            raise RendezvousError(
                f"{self._where}: another thread sets up a channel of this name at this moment, and "
                "the other ranks can't tell the two apart: give each a name of its own"
            )
        _meeting.add(key)
        try:
            records = self._exchange(phase, record)
        finally:
            _meeting.discard(key)
        self._has_met = True
        return records

    def _group_name(self) -> str:
        with suppress(RuntimeError):  # of a group that torch has not named
            return str(self._group.group_name)
        return ""

    def _exchange(self, phase: str, record: Record) -> list[dict[str, Any]]:
        end = time.monotonic() + self._deadline
        try:
            texts = within(self._deadline + _GRACE, lambda: self._come(phase, record, end))
        except TooLateError as error:
            self._stuck = True
            raise RendezvousError(self._silent_store(phase)) from error
        except RendezvousError:
            raise
        except BaseException as error:  # from a signal's handler
            self._interrupted(error)
            raise
        own = json.loads(texts[self._rank])
        return [self._parse(phase, rank, text, own) for rank, text in enumerate(texts)]

    def _come(self, phase: str, record: Record, end: float) -> list[bytes]:
        try:
            with self._telling:
                self._check_not_left()
                self._meeting.come(phase, json.dumps(record))
            pause = _SHORTEST_PAUSE
            # It does not wait in the store, whose connection would then be taken: nothing could be
            # told meanwhile.
            while True:
                with self._telling:
                    self._check_not_left()
                    if self._meeting.look():
                        return self._meeting.texts()
                    # The store's time so far does not extend the deadline: the grace is only for
                    # asking who is missing.
                    if time.monotonic() >= end:
                        return self._give_up(phase)
                time.sleep(min(pause, max(0.0, end - time.monotonic())))
                pause = min(2 * pause, _LONGEST_PAUSE)
        except OtherRankFailedError as error:
            raise self._failed(error.rank, error.reason) from None
        except ForeignRecordError as error:
            reason = f"{self._where}: {error}"
            with suppress(RuntimeError):
                self._meeting.fail(reason)
            raise RendezvousError(reason) from error
        except RendezvousError:
            raise
        except (RuntimeError, dist.DistError) as error:
            raise RendezvousError(self._silent_store(phase)) from error

    def _give_up(self, phase: str) -> list[bytes]:
        missing = f"some ranks did not come to phase '{phase}' within {self._deadline} s"
        if self._meeting.give_up(f"{self._where}: {missing}"):
            return self._meeting.texts()
        raise RendezvousError(
            f"{self._where}: {self.names.of_all(self._meeting.missing)} did not come to phase "
            f"'{phase}' within {self._deadline} s, which {self.deadline_name} sets. Every rank of "
            "the group must create the channel (shard the module, run its first batch) under the "
            "same name; a rank that is late meets the others at their next try"
        )

    def _check_not_left(self) -> None:
        if self._stuck:
            # Nobody waits for this thread any more, but other ranks may take the try for alive.
            with suppress(RuntimeError, OtherRankFailedError):
                self._meeting.give_up(f"{self._where}: its store did not answer in time")
        if self._left or self._stuck:
            raise RuntimeError("this try has ended")

    def _parse(self, phase: str, rank: int, text: bytes, own: Any) -> dict[str, Any]:
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            record = None
        if not _same_form(record, own):
            raise RendezvousError(
                f"{self._where}: {self.names.of(rank)} announced {text[:200]!r} in phase "
                f"'{phase}', which has another form than this rank's record. Install one version "
                "of torchrec-bls on all ranks"
            )
        return dict(record)

    def _failed(self, rank: int, reason: str) -> RendezvousError:
        return RendezvousError(
            f"{self._where}: {self.names.of(rank)} could not set it up: {reason}"
        )

    @contextmanager
    def own_part(self) -> Iterator[None]:
        """Surrounds the work that this rank has to do before it can come to the next exchange. If
        the work fails, the others are told, and RendezvousError is raised here."""
        try:
            yield
        except (OSError, BLSError) as error:
            cure = ""
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                cure = ". Raise the limit of open files (ulimit -n)"
            reason = f"{self._where}: {error}{cure}"
            earlier = self.fail(reason)
            if earlier is not None:
                # What that rank set up is gone, and that may be the only fault here.
                rank, theirs = earlier
                reason += f". Before, {self.names.of(rank)} could not set it up: {theirs}"
            raise RendezvousError(reason) from error
        except BaseException as error:
            self._interrupted(error)
            raise

    def _interrupted(self, error: BaseException) -> None:
        self.fail(f"{self._where}: {named(error)}", _TELLING_OF_AN_INTERRUPT)

    def awaiting(self) -> list[int]:
        """Returns the ranks that have come, before this one has. Tells nobody anything."""
        with suppress(RuntimeError, TooLateError, ForeignRecordError):
            return within(min(self._deadline, _TELLING), self._meeting.awaiting)
        return []

    @property
    def session(self) -> str:
        """Returns the name of this meeting, the same on all ranks, after the first exchange."""
        return self._meeting.joined

    def fail(self, reason: str, telling: float = _TELLING) -> tuple[int, str] | None:
        """Tells the other ranks why this one does not come, in at most `telling` seconds. Ranks
        that have met this one hear it in this exchange or in the next; ranks that have not, now or
        at their next try.

        Returns:
            The rank that failed before this one in the same exchange, and its reason, or None.
        """
        self._left = True  # a wait that goes on leaves the connection to `tell`

        def tell() -> tuple[int, str] | None:
            with self._telling:
                return self._meeting.fail(reason)

        # Without a store nobody waits.
        with suppress(RuntimeError, TooLateError):
            return within(min(self._deadline, telling), tell)
        return None

    def _silent_store(self, phase: str) -> str:
        return (
            f"{self._where}: the process group's store does not answer in phase '{phase}'. The "
            "process that hosts it (rank 0 or torchrun) has ended or is stuck: look at its output, "
            "and start the ranks again"
        )


def _same_form(record: Any, own: Any) -> bool:
    """Returns whether two parsed records have the same fields and, throughout, the same types."""
    if type(record) is not type(own):
        return False
    if isinstance(own, dict):
        return record.keys() == own.keys() and all(_same_form(record[k], own[k]) for k in own)
    if isinstance(own, list):
        return len(record) == len(own) and all(map(_same_form, record, own))
    return True


def require_equal(
    name: str,
    records: Sequence[Mapping[str, Any]],
    fields: Mapping[str, str],
    names: RankNames | None = None,
) -> None:
    """Checks that all ranks announced the same value of each field.

    Args:
        name: name of the channel, for the message.
        records: records by rank.
        fields: what the user has to change if a field differs, by the field's name.
        names: names of the ranks.

    Raises:
        RendezvousError: ranks have different values; the text names the field, the ranks and the
            cure.
    """
    names = names or RankNames(range(len(records)))
    for field, cure in fields.items():
        ranks_by_value: dict[Any, list[int]] = defaultdict(list)
        for rank, record in enumerate(records):
            ranks_by_value[record[field]].append(rank)
        if len(ranks_by_value) > 1:
            values = "; ".join(f"{names.of_all(r)}: {v}" for v, r in ranks_by_value.items())
            raise RendezvousError(
                f"channel '{name}': {field} differs between ranks ({values}). {cure}"
            )


def host_identity() -> str:
    """Names the boot, the PID namespace and the user namespace: they must be equal for two
    processes to share memory. Without one user namespace, a process may not open the other's
    descriptors."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = "/".join(str(Path(f"/proc/self/ns/{kind}").stat().st_ino) for kind in ("pid", "user"))
    return f"{boot}/{spaces}"

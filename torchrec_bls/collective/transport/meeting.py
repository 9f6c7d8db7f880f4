"""One rank's try to meet the other ranks of a group under a name: operations on the group's store.

Nothing here waits, and every method is a short series of store operations, between which other
ranks may do anything. docs/design/rendezvous.md says why no rank meets without the others.
"""

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Protocol

from torchrec_bls.collective.transport.rank_names import RankNames
from torchrec_bls.errors import RendezvousError

# Values of the word that decides an exchange, written once. Any other value is a failure.
_DONE = "done"
_ABANDONED = "abandoned"

# A seat in which no try stands.
_NO_TRY: tuple[str, None, dict[str, str], bool] = ("", None, {}, False)


class StoreOperations(Protocol):
    """The operations that every store of torch.distributed has."""

    def set(self, key: str, value: str, /) -> None:
        """Sets a key."""

    def get(self, key: str, /) -> bytes:
        """Returns the value of a key that exists."""

    def check(self, keys: list[str], /) -> bool:
        """Returns whether all keys exist."""

    def add(self, key: str, amount: int, /) -> int:
        """Adds to a counter."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Sets a key that has the value `expected`, or is missing where that is "". Returns the
        value afterwards."""

    def delete_key(self, key: str, /) -> bool:
        """Deletes a key, if it exists."""


class OtherRankFailedError(Exception):
    """Another rank has failed before all came."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(rank, reason)
        self.rank = rank
        self.reason = reason


class ForeignRecordError(RendezvousError):
    """A rank has written something that this version does not write."""


class Meeting:
    """One try of a rank: first it finds a set of tries, one a rank. Then these exchange records.

    Keys below `base`: `seat/R` tells of rank R's newest try and is its own. `changes` counts
    writings to seats, so that nobody reads all seats again and again. `SET/STEP` is the word that
    decides an exchange of a set, and `SET/PHASE/R` is the record of rank R.

    Args:
        store: store of the group.
        base: first part of all keys.
        rank: this rank's number in the group.
        world_size: number of ranks in the group.
        nonce: a name that no other try has.
        session: what the ranks have met for before; tries of other sessions are none for this one.
        names: names of the ranks in errors; None: their numbers.

    Attributes:
        missing: ranks that had not come when the store was asked last.
        joined: digest of the set that this try has joined; empty before.
    """

    def __init__(
        self,
        store: StoreOperations,
        base: str,
        rank: int,
        world_size: int,
        nonce: str,
        session: str = "",
        names: RankNames | None = None,
    ) -> None:
        self._names = names or RankNames(range(world_size))
        self._store = store
        self._base = base
        self._rank = rank
        self._world_size = world_size
        self._nonce = nonce
        self._session = session
        self.joined = ""
        self.missing: list[int] = []
        self._step = 0
        self._phase = ""
        self._text = ""
        self._nonces: dict[int, str] = {}  # tries of other ranks, as seen
        self._dead: list[str] = []  # sets that were given up
        self._changes = b""
        self._seat = ""  # as written last
        self._heard: dict[str, str] = {}  # failed tries that this rank has raised for, by rank
        self._beside: dict[str, str] = {}  # failed tries that stood when this one failed, by rank
        self._failed = ""  # nonce of this rank's try before, if that failed
        self._left: list[str] = []  # keys to delete once all ranks have come to the next exchange

    def come(self, phase: str, text: str) -> None:
        """Gives a record to the others.

        Args:
            phase: name of the exchange, the same on all ranks.
            text: the record.
        """
        self._phase, self._text = phase, text
        if self._step > 0:
            self._store.set(self._record_key(self._rank), text)
            return
        self._recall()
        self._seat = self._seat_text(self._nonce)
        self._store.set(self._seat_key(self._rank), self._seat)
        self._store.add(self._changes_key, 1)

    def look(self) -> bool:
        """Returns whether all ranks have come, and are bound to it.

        Raises:
            OtherRankFailedError: a rank has failed before.
            ForeignRecordError: a rank of another version has come.
        """
        if self._step > 0:
            return self._is_decided()
        changes = self._store.get(self._changes_key)
        if not self.joined and changes != self._changes:
            self._changes = changes
            self._look_for_a_set()
        if not self.joined:
            return False
        if self._all_records_are_there():
            return self._decide_to(_DONE)
        if changes != self._changes:
            self._changes = changes
            if self._has_lost_a_rank():
                return self._decide_to(_ABANDONED)
        return False

    def texts(self) -> list[bytes]:
        """Returns the records of all ranks, after `look` or `give_up` returned True, and begins the
        next step."""
        texts = [self._store.get(self._record_key(rank)) for rank in range(self._world_size)]
        self._forget_last()
        self._step += 1
        return texts

    def give_up(self, reason: str) -> bool:
        """Ends the try because it took too long. Returns True if all ranks have come all the same:
        then the exchange is done.

        Args:
            reason: reason for ranks that have met this one already.

        Raises:
            OtherRankFailedError: another rank has failed before.
        """
        self._note_missing()
        if self._step > 0:
            decided = self._decide(self._step, _failure(self._rank, reason))
            if decided == _DONE:
                return True
            self._left.append(self._step_key(self._step))
            self._withdraw()
            rank, told = self._failure_in(decided)
            if rank != self._rank:
                raise OtherRankFailedError(rank, told)
            return False
        if self.joined and self._decide_to(_ABANDONED):
            return True
        self._withdraw()
        return False

    def fail(self, reason: str) -> tuple[int, str] | None:
        """Ends the try, if it has begun, and tells the others why. Ranks that have not come yet are
        told at their next try, unless this rank tries again before.

        Returns:
            The rank that failed before this one in the same exchange, and its reason, or None.
        """
        if self._step == 0 and not (self.joined and self._decide_to(_ABANDONED)):
            self._tell_of_failure(reason)
            return None
        # Others may have all records of this step, and wait in the next one.
        told = _failure(self._rank, reason)
        step = max(1, self._step)
        decided = self._decide(step, told)
        if decided == _DONE:
            step += 1
            decided = self._decide(step, told)
        self._left.append(self._step_key(step))
        self._withdraw()
        rank, theirs = self._failure_in(decided)
        return None if rank == self._rank else (rank, theirs)

    def awaiting(self) -> list[int]:
        """Returns the ranks whose newest try has not met the others. Changes nothing."""
        seats = {rank: self._seat_of(rank) for rank in range(self._world_size)}
        return [
            rank
            for rank, (nonce, error, _, has_met) in seats.items()
            if rank != self._rank and nonce and error is None and not has_met
        ]

    def key(self, phase: str, name: str) -> str:
        """Returns a key that only the tries of this set have."""
        return f"{self._base}/{self.joined}/{phase}/{name}"

    def _look_for_a_set(self) -> None:
        self._nonces[self._rank] = self._nonce
        self._look_at_seats(r for r in range(self._world_size) if r not in self._nonces)
        self._note_missing()
        if self.missing:
            return
        digest = _digest(self._nonces[rank] for rank in range(self._world_size))
        if digest in self._dead:
            self._nonces.clear()  # who gave it up is about to say so
            return
        self.joined = digest
        self._store.set(self._record_key(self._rank), self._text)
        self._changes = b""  # what was seen may be older than this set: look again

    def _look_at_seats(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            nonce, error, beside, _ = self._seat_of(rank)
            if error is not None and self._is_news(rank, nonce, beside):
                self._heard[str(rank)] = nonce
                self._withdraw()
                raise OtherRankFailedError(rank, error)
            if nonce and error is None:
                self._nonces[rank] = nonce

    def _is_news(self, rank: int, nonce: str, beside: dict[str, str]) -> bool:
        """Returns whether a failed try of a rank is none that this rank has heard of, and not one
        of two that failed together."""
        both_failed = self._failed and beside.get(str(self._rank)) == self._failed
        return self._heard.get(str(rank)) != nonce and not both_failed

    def _seat_of(self, rank: int) -> tuple[str, str | None, dict[str, str], bool]:
        """Returns the nonce of a rank's newest try, why it failed, which failed tries of others
        stood then, and whether it has met the others; no nonce: it is given up."""
        if not self._store.check([self._seat_key(rank)]):
            return _NO_TRY
        text = self._store.get(self._seat_key(rank))
        seat = _parsed(text)
        nonce, error, beside = seat.get("nonce"), seat.get("error"), seat.get("beside")
        if (
            not isinstance(nonce, str)
            or not isinstance(error, str | None)
            or not isinstance(beside, dict)
        ):
            raise _foreign(self._names.of(rank), text)
        size = seat.get("world_size")
        if size != self._world_size:
            raise ForeignRecordError(
                f"world_size differs between ranks ({self._names.of_all([rank])}: {size}; "
                f"{self._names.of_all([self._rank])}: {self._world_size}). All "
                "ranks must create it in the same process group"
            )
        if seat.get("session") != self._session:
            return _NO_TRY
        return nonce, error, beside, seat.get("met") is True

    def _has_lost_a_rank(self) -> bool:
        """Returns whether a rank has ended the try that this set has of it."""
        self._note_missing()
        return any(self._seat_of(r)[:2] != (self._nonces[r], None) for r in self.missing)

    def _decide_to(self, value: str) -> bool:
        """Decides the first exchange, unless another rank did before. Returns whether all ranks are
        bound to it. Otherwise leaves the set."""
        decided = self._decide(0, value)
        if decided == _DONE:
            return True
        self._delete(self._record_key(self._rank))
        self._left.append(self._step_key(0))
        self._dead.append(self.joined)
        self.joined = ""
        self._nonces.clear()
        self._changes = b""
        return False

    def _is_decided(self) -> bool:
        if self._all_records_are_there():
            decided = self._decide(self._step, _DONE)
        elif self._store.check([self._step_key(self._step)]):
            decided = self._store.get(self._step_key(self._step)).decode(errors="replace")
        else:
            return False
        if decided == _DONE:
            return True
        self._left.append(self._step_key(self._step))
        self._withdraw()
        raise OtherRankFailedError(*self._failure_in(decided))

    def _decide(self, step: int, value: str) -> str:
        return self._store.compare_set(self._step_key(step), "", value).decode(errors="replace")

    def _all_records_are_there(self) -> bool:
        return self._store.check([self._record_key(rank) for rank in range(self._world_size)])

    def _note_missing(self) -> None:
        ranks = range(self._world_size)
        if self.joined:
            self.missing = [r for r in ranks if not self._store.check([self._record_key(r)])]
        else:
            self.missing = [r for r in ranks if r not in self._nonces and r != self._rank]

    def _tell_of_failure(self, reason: str) -> None:
        if not self._seat:
            self._recall()
        self._replace_seat(self._seat_text(self._nonce, reason))
        # Ranks that failed before this one did so in the same series of tries.
        for rank in range(self._world_size):
            if rank != self._rank:
                with suppress(ForeignRecordError):
                    nonce, error, *_ = self._seat_of(rank)
                    if error is not None:
                        self._heard[str(rank)] = self._beside[str(rank)] = nonce
        self._replace_seat(self._seat_text(self._nonce, reason))

    def _withdraw(self) -> None:
        if self.joined:
            self._left.append(self._record_key(self._rank))
        self._replace_seat(self._seat_text(""))

    def _recall(self) -> None:
        """Takes over what this rank's former tries have left to do."""
        key = self._seat_key(self._rank)
        if self._store.check([key]):
            self._seat = self._store.get(key).decode(errors="replace")
            seat = _parsed(self._seat)
            if isinstance(seat.get("error"), str):
                self._failed = str(seat.get("nonce"))
            with suppress(TypeError, ValueError, AttributeError):
                self._heard = {str(rank): str(nonce) for rank, nonce in seat["heard"].items()}
                self._left = [key for key in seat["left"] if key.startswith(f"{self._base}/")]

    def _replace_seat(self, text: str) -> None:
        """Changes the seat, unless a later try of this rank has taken it."""
        key, expected = self._seat_key(self._rank), self._seat
        if self._store.compare_set(key, expected, text).decode(errors="replace") == text:
            self._seat = text
            self._store.add(self._changes_key, 1)

    def _seat_text(self, nonce: str, error: str | None = None, met: bool = False) -> str:
        return json.dumps(
            {
                "nonce": nonce,
                "world_size": self._world_size,
                "session": self._session,
                "error": error,
                "met": met,
                "heard": self._heard,
                "beside": self._beside,
                "left": self._left,
            }
        )

    def _forget_last(self) -> None:
        """Deletes what no rank reads any more, since all have come to this exchange, and notes what
        this exchange leaves."""
        left, self._left = (
            self._left,
            [self._record_key(self._rank), self._step_key(self._step)],
        )
        for key in left:
            self._delete(key)
        key, text = self._seat_key(self._rank), self._seat_text(self._nonce, met=True)
        if self._store.compare_set(key, self._seat, text).decode(errors="replace") == text:
            self._seat = text  # the same try: no change that others wait for

    def _delete(self, key: str) -> None:
        with suppress(RuntimeError):  # from a store that keeps everything
            self._store.delete_key(key)

    def _failure_in(self, decided: str) -> tuple[int, str]:
        failure = _parsed(decided)
        rank, reason = failure.get("rank"), failure.get("error")
        if not isinstance(rank, int) or not 0 <= rank < self._world_size:
            raise _foreign("a rank", decided.encode())
        return rank, str(reason)

    @property
    def _changes_key(self) -> str:
        return f"{self._base}/changes"

    def _seat_key(self, rank: int) -> str:
        return f"{self._base}/seat/{rank}"

    def _step_key(self, step: int) -> str:
        return f"{self._base}/{self.joined}/{step}"

    def _record_key(self, rank: int) -> str:
        return self.key(self._phase, str(rank))


def _failure(rank: int, reason: str) -> str:
    return json.dumps({"rank": rank, "error": reason})


def _digest(nonces: Iterable[str]) -> str:
    """Returns the name of a set of tries."""
    return hashlib.sha256(json.dumps(list(nonces)).encode()).hexdigest()[:32]


def _parsed(text: bytes | str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _foreign(who: str, text: bytes) -> ForeignRecordError:
    return ForeignRecordError(
        f"{who} announced {text[:200]!r}. Install one version of torchrec-bls on all ranks"
    )

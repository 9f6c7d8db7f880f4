"""One life of a group of ranks: a sharded model in a pipeline, from its start to its end."""

import os
import random
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.datasets.utils import Batch

from tests.distributed.dlrm import make_batch, make_dlrm
from tests.distributed.pipeline.test_pipeline import FusedDLRM, sharder
from tests.distributed.pipeline.test_updates import set_version
from torchrec_bls import BoundedLagPipeline
from torchrec_bls.errors import BadBatchError, BLSError, PipelineError

KINDS = 5  # different good batches, whose outputs are computed beforehand
VERSIONS = 4  # of the weights
GOOD, EMPTY, BAD_ID, BAD_TYPE, MODEL_RAISES, LOADER_RAISES, NOTHING = (
    "good batch",
    "batch without samples",
    "bad id",
    "no KeyedJaggedTensor",
    "exception in the model",
    "exception in the loader",
    "no batch at the moment",
)
# What a program may try while batches are under way. It is refused, and harms nothing.
THREAD, LOAD, DETACH = "call from a thread", "load_state_dict in flight", "detach in flight"
_TRIES = 0.05  # of the steps with batches under way
_WEIGHTS = {
    GOOD: 60,
    EMPTY: 5,
    BAD_ID: 8,
    BAD_TYPE: 4,
    MODEL_RAISES: 5,
    LOADER_RAISES: 4,
    NOTHING: 8,
}


@dataclass(frozen=True)
class Life:
    """What all ranks of a life know.

    Attributes:
        seed: of everything that is drawn.
        ranks: number of them.
        bound: of the sharders.
        transport: of the channels.
        epochs: iterators that each rank's pipeline is given, one after the other.
        batches: that a rank's iterator has at most; it draws how many.
        interrupted: rank that gets SIGINT at some time, or None.
    """

    seed: int
    ranks: int
    bound: int
    transport: str
    epochs: int
    batches: int
    interrupted: int | None

    @classmethod
    def draw(cls, seed: int, epochs: int = 4, batches: int = 60) -> "Life":
        """Returns the life of a seed."""
        draw = random.Random(seed)
        ranks = draw.choice([2, 2, 3, 4])
        return cls(
            seed,
            ranks,
            draw.choice([0, 1, 2, 4]),
            draw.choice(["shm", "tcp"]),
            epochs,
            batches,
            draw.randrange(ranks) if draw.random() < 0.3 else None,
        )


class _Source(Iterator[Batch | None]):
    """Yields drawn batches and raises at times; what it gave stands in `given`.

    Like a loader that fills its buffers again, it may write over the ids of a batch that it gave.
    """

    def __init__(self, draw: random.Random, rank: int, batches: int) -> None:
        self.given: list[tuple[str, int]] = []
        self.lent: list[Batch] = []
        self._rank = rank
        self._actions = draw.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=batches)
        self._draw = draw

    def __next__(self) -> Batch | None:
        if not self._actions:
            raise StopIteration
        action, kind = self._actions.pop(), self._draw.randrange(KINDS)
        self.given.append((action, kind))
        if action == LOADER_RAISES:
            raise OSError("drawn")
        if action == NOTHING:
            return None
        self.lent.append(batch_of(action, self._rank, kind))
        return self.lent[-1]

    def refill(self) -> int:
        """Writes over the ids of all batches that were given. Returns how many had ids."""
        lent = [batch.sparse_features for batch in self.lent if batch.sparse_features is not None]
        for ids in lent:
            ids.values().fill_(1)
            ids.lengths().fill_(9)
        self.lent.clear()
        return len(lent)


def batch_of(action: str, rank: int, kind: int) -> Batch:
    """Returns the batch that an action gives."""
    batch = make_batch(rank, kind)
    if action == EMPTY:
        empty = make_batch(rank, kind)
        features = empty.sparse_features
        none = torch.zeros(0, dtype=torch.int32)
        empty.sparse_features = type(features)(
            keys=features.keys(), values=features.values()[:0], lengths=none, stride=0
        )
        return Batch(batch.dense_features[:0], empty.sparse_features, batch.labels[:0])
    if action == BAD_ID:
        batch.sparse_features.values()[-1] = 10**9
    elif action == BAD_TYPE:
        return Batch(batch.dense_features, None, batch.labels)  # type: ignore[arg-type]
    elif action == MODEL_RAISES:
        batch.labels[0] = 666
    return batch


def live(rank: int, life: Life) -> tuple[Counter[str], str]:
    """Lives a life on one rank and checks every answer. Returns the actions it did by name, and how
    it ended."""
    draw = random.Random(life.seed * 1000 + rank)
    expected = _expected(rank)
    model = make_dlrm(sharder(life.bound, transport=life.transport), FusedDLRM)
    set_version(model, 0)
    pipeline = BoundedLagPipeline[Batch, torch.Tensor](model)
    actions: Counter[str] = Counter()
    offered = seen = 0
    interrupting = False
    source = None
    try:
        for _ in range(life.epochs):
            source = _Source(draw, rank, draw.randrange(life.batches + 1))
            answered = 0
            while True:
                if offered < VERSIONS - 1 and draw.random() < 0.02:
                    offered += 1
                    actions["update"] += 1
                    pipeline.update(lambda v=offered: set_version(model, v))  # type: ignore[misc]
                try:
                    answer: Any = pipeline.progress(source)
                except StopIteration:
                    break
                except PipelineError as error:
                    answer = error
                    if isinstance(error.__cause__, OSError):
                        continue  # nothing was sent
                actions["refilled batch"] += source.refill()
                asked = [given for given in source.given if given[0] != LOADER_RAISES]
                if rank == life.interrupted and not interrupting:
                    # Not before: a rank that ends during the set-up is noticed at the deadline.
                    interrupting = True
                    _interrupt_soon(draw)
                action, kind = asked[answered]
                seen = _check(answer, action, expected, kind, seen)
                answered += 1
                if answered < len(asked) and draw.random() < _TRIES:
                    actions[_try_something(draw, model, pipeline, rank)] += 1
            asked = [given for given in source.given if given[0] != LOADER_RAISES]
            assert answered == len(asked), f"{answered} answers for {len(asked)} batches"
            actions.update(action for action, _ in source.given)
            actions["end"] += 1
    except KeyboardInterrupt:
        assert rank == life.interrupted
        actions["interrupt"] += 1
        actions.update(action for action, _ in source.given)
        return actions, "KeyboardInterrupt"
    except BLSError as error:
        assert life.interrupted is not None, error
        actions.update(action for action, _ in source.given)
        return actions, type(error).__name__
    finally:
        _ended.set()
    assert not _interrupted_at, f"nobody heard the interrupt at\n{_interrupted_at[0]}"
    return actions, "end"


def _try_something(
    draw: random.Random, model: nn.Module, pipeline: BoundedLagPipeline[Any, Any], rank: int
) -> str:
    """Does what is refused while batches are under way, and returns what it was."""
    action = draw.choice([THREAD, LOAD, DETACH])
    if action == THREAD:
        raised: list[Exception] = []

        def call() -> None:
            try:
                model(make_batch(rank, 0))
            except Exception as error:
                raised.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert len(raised) == 1 and "BoundedLagPipeline" in str(raised[0]), raised
    elif action == LOAD:
        with pytest.raises(ValueError, match="drain"):
            model.load_state_dict(model.state_dict())
    else:
        with pytest.raises(ValueError, match="under way"):
            pipeline.detach()
    return action


def _expected(rank: int) -> list[dict[tuple[str, int], torch.Tensor]]:
    """Returns the right outputs, by version: those of the model called batch by batch."""
    reference = make_dlrm(sharder(0), FusedDLRM)
    expected = []
    for version in range(VERSIONS):
        set_version(reference, version)
        with torch.no_grad():
            expected.append(
                {
                    (action, kind): reference(batch_of(action, rank, kind))
                    for action in (GOOD, EMPTY)
                    for kind in range(KINDS)
                }
            )
    return expected


def _check(
    answer: Any,
    action: str,
    expected: list[dict[tuple[str, int], torch.Tensor]],
    kind: int,
    oldest: int,
) -> int:
    """Checks an answer and returns its version, at least `oldest`."""
    if action in (BAD_ID, BAD_TYPE):
        assert isinstance(answer, BadBatchError), f"{action}: {answer!r}"
    elif action == MODEL_RAISES:
        assert type(answer) is PipelineError, f"{action}: {answer!r}"
    elif action == NOTHING:
        assert answer is None, f"{action}: {answer!r}"
    elif action == EMPTY:
        assert answer.shape == expected[0][action, kind].shape
    else:
        of = [v for v, outputs in enumerate(expected) if torch.equal(outputs[action, kind], answer)]
        assert len(of) == 1 and of[0] >= oldest, f"output of versions {of} after {oldest}"
        return of[0]
    return oldest


_ended = threading.Event()
_interrupted_at: list[str] = []  # the stack that the signal's handler met, once it has


def _interrupt_soon(draw: random.Random) -> None:
    after = draw.random() * 0.3

    def handle(_: int, frame: FrameType | None) -> None:
        _interrupted_at.append("".join(traceback.format_stack(frame)[-6:]))
        raise KeyboardInterrupt

    def interrupt() -> None:
        time.sleep(after)
        if not _ended.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, handle)
    threading.Thread(target=interrupt, daemon=True).start()

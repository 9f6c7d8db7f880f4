"""What is measured of the stages, by a clock that tests move."""

from collections.abc import Sequence

import numpy as np
import pytest

from tests.analysis.sampled import lookup, one_id_each, random_weights, table
from torchrec_bls.analysis import compression_speeds
from torchrec_bls.analysis.frames import Frame
from torchrec_bls.analysis.samples import Lookup
from torchrec_bls.codecs.compression import Compression

WEIGHTS = random_weights()


class Clock:
    """Says that each encoding takes twice as many seconds as the number of its turn has, and each
    decoding once; in turn 0, 1,000 seconds."""

    def __init__(self) -> None:
        self.asked = 0
        self._now = 0.0

    def __call__(self) -> float:
        # Before and after an encoding, before and after a decoding, of all stages in turn.
        turn = self.asked // (4 * len(Compression)) % (compression_speeds.TURNS + 1)
        self._now += (0, 2, 0, 1)[self.asked % 4] * (turn or 1000)
        self.asked += 1
        return self._now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(compression_speeds, "perf_counter", made)
    return made


def frame(lookups: Sequence[Lookup], stages: Compression, pooled: bool, weighted: bool) -> Frame:
    made = Frame(lookups, stages, 0.01, pooled=pooled, weighted=weighted)
    made.encode()
    made.decode()
    return made


def test_ratios_are_of_all_bytes_and_speeds_of_the_medians(clock: Clock) -> None:
    batches = [[lookup(WEIGHTS, one_id_each(range(count)))] for count in (10, 90)]
    batches.insert(1, [lookup(WEIGHTS, [])])
    measured = compression_speeds.measure(table(), batches, 0.01)
    raw = 100 * 8 * 4
    assert list(measured) == list(Compression)
    for stages in Compression:
        frames = [Frame(batch, stages, 0.01, pooled=True, weighted=False) for batch in batches]
        assert measured[stages].ratio == raw / (frames[0].bytes + frames[2].bytes)
        # Two batches have rows, and turn 5 of 1 to 9 is in the middle.
        assert measured[stages].encode == raw / (2 * 10)
        assert measured[stages].decode == raw / (2 * 5)
    assert clock.asked == 2 * 4 * len(Compression) * (compression_speeds.TURNS + 1)


@pytest.mark.parametrize("pooled", [True, False])
def test_rows_arrive_by_all_stages(pooled: bool) -> None:
    bags = [[[1], [2, 3], [], [1], [2, 3]], [[5], [1], [], [1, 1], [5]]]
    lookups = [lookup(WEIGHTS, each, pooled) for each in bags]
    for stages in Compression:
        received = frame(lookups, stages, pooled, weighted=False).received
        for found, wanted in zip(received, lookups, strict=True):
            if stages.bounded:
                assert np.abs(found - wanted.rows).max() <= 0.01
            else:
                assert np.array_equal(found, wanted.rows)


def test_rows_of_equal_ids_travel_once() -> None:
    equal = [lookup(WEIGHTS, one_id_each([7] * 50))]
    bytes_of = {stages: frame(equal, stages, True, False).bytes for stages in Compression}
    assert bytes_of[Compression.AS_THEY_ARE] - bytes_of[Compression.UNIQUE] == 49 * 8 * 4
    # Their ids say so, not their bits.
    zeros = [lookup(np.zeros_like(WEIGHTS), one_id_each(range(50)))]
    assert frame(zeros, Compression.UNIQUE, True, False).bytes == bytes_of[Compression.AS_THEY_ARE]


def test_rows_of_weighted_bags_travel_each_for_itself() -> None:
    # Equal ids with other weights.
    bags = lookup(WEIGHTS, one_id_each([7, 7]))
    bags.rows[1] *= 2
    received = frame([bags], Compression.HUFFMAN, True, weighted=True).received[0]
    assert np.abs(received - bags.rows).max() <= 0.01
    measured = compression_speeds.measure(table(weighted=True), [[bags]], 0.01)
    assert list(measured) == [Compression.AS_THEY_ARE, Compression.FIXED, Compression.HUFFMAN]


def test_a_table_without_rows_has_no_speeds() -> None:
    with pytest.raises(ValueError, match="no batch looks anything up in table 't'"):
        compression_speeds.measure(table(), [[lookup(WEIGHTS, [])]], 0.01)

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec_bls.sharding.reuse.statistics import REUSE_BINS, ReuseStatistics

from tests.paths import DATA
from tests.sharding.reuse.dlrm_locality import LocalityHistogram, read_batch, read_locality
from tests.sharding.reuse.generate_batches import generate_batch

HISTOGRAMS = DATA / "dlrm-locality"


def text_of(by_rows: list[float], by_lookups: list[float]) -> str:
    ends = ["(0, 1]", *(f"({2**i}, {2 ** (i + 1)}]" for i in range(15)), "(32768+"]
    rows = "\n".join(f"{end}: {share:.3f}" for end, share in zip(ends, by_rows, strict=True))
    lookups = "\n".join(f"{end}: {share:.3f}" for end, share in zip(ends, by_lookups, strict=True))
    return (
        "fbgemm_t3_bs128_0.pt\nLocality stats after processing 1 batches of size 128\n"
        "Avg # of indices: 4000\nAvg # of unique cols: 2000\nAvg col size: 2.0\n"
        f"Histogram of col sizes:\n{rows}\n[0, 1, 2]\n['0.000']\n"
        f"Ratio of index distribution at different column sizes:\n{lookups}\n[0, 1, 2]\n['0.000']\n"
    )


def padded(*shares: float) -> list[float]:
    return [*shares, *[0.0] * (REUSE_BINS - len(shares))]


def test_reads_histograms_and_the_reuse_that_follows_from_them(tmp_path: Path) -> None:
    path = tmp_path / "stats.txt"
    text = text_of(padded(0.5, 0.25, 0.25), padded(0.25, 0.25, 0.5))
    path.write_text(text + "\n" + text)
    first, second = read_locality(path)
    assert (first.tables, first.samples, first.lookups, first.unique_rows) == (3, 128, 4000, 2000)
    # Bin 2 holds a quarter of the rows and half of the lookups, which are 2 a row on average.
    assert first.mean_reuse()[:3] == pytest.approx([1.0, 2.0, 4.0])
    assert np.array_equal(first.by_rows, second.by_rows)


def test_a_histogram_without_all_bins_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "stats.txt"
    path.write_text(text_of(padded(1.0), padded(1.0)).replace("(1, 2]", "(1, 3)"))
    with pytest.raises(ValueError, match="17 bins"):
        read_locality(path)


def test_batches_follow_a_pooled_histogram(tmp_path: Path) -> None:
    by_rows, by_lookups = padded(0.5, 0.25, 0.25), padded(0.25, 0.25, 0.5)
    histogram = LocalityHistogram(
        "h", 3, 4096, 4000, 2000, np.asarray(by_rows), np.asarray(by_lookups)
    )
    table = histogram.table_statistics(rows=100_000, pooling_factor=5.0)
    made = ReuseStatistics.from_batches([generate_batch({"t": table}, 4096, seed=0)])["t"]
    assert made.reuse_factors == pytest.approx(by_rows, abs=0.02)
    assert made.unique_at[-1] == pytest.approx(4096 * 5 / 2, rel=0.01)
    with pytest.raises(ValueError, match="the table has 1000"):
        histogram.table_statistics(rows=1000, pooling_factor=5.0)


def test_small_parts_of_a_pooled_batch_recur_less() -> None:
    by_rows, by_lookups = padded(0.0, 0.0, 0.5, 0.0, 0.5), padded(0.0, 0.0, 0.2, 0.0, 0.8)
    histogram = LocalityHistogram(
        "h", 3, 3000, 20_000, 2000, np.asarray(by_rows), np.asarray(by_lookups)
    )
    table = histogram.table_statistics(rows=100_000, pooling_factor=5.0)
    assert table.sample_sizes[[0, -2, -1]].tolist() == [1, 1500, 3000]
    # Half of the rows are read 4 times, half of them 16 times: 1,500 in all are. A quarter of the
    # batch misses three quarters of the reads of each.
    assert table.unique_rows(3000) == pytest.approx(1500)
    assert table.unique_rows(750) == pytest.approx(750 * (2 - 0.75**4 - 0.75**16))
    assert table.unique_rows(1) == pytest.approx(5, rel=0.01)
    # Parts of batches that are made with the counts of the whole are alike.
    parts = [generate_batch({"t": table}, 750, seed=seed) for seed in range(4)]
    made = np.mean([len(np.unique(part["t"].values().numpy())) for part in parts])
    assert table.unique_rows(750) == pytest.approx(made, rel=0.08)


@pytest.mark.parametrize("name", ["batch.pt", "batch.pt.gz"])
def test_reads_a_batch(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    lengths = torch.tensor([[1, 2], [0, 3]])
    content = (torch.arange(6), torch.tensor([0, 1, 3, 3, 6]), lengths)
    with gzip.open(path, "wb") if path.suffix == ".gz" else path.open("wb") as file:
        torch.save(content, file)
    batch, samples = read_batch(path)
    assert samples == 2
    assert batch["t_0"].values().tolist() == [0, 1, 2]
    assert batch["t_1"].lengths().tolist() == [0, 3]


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("harm"),)  # type: ignore[return-value]


def test_a_file_that_holds_code_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "batch.pt"
    torch.save(Evil(), path)
    with pytest.raises(pickle.UnpicklingError):
        read_batch(path)
    assert not (tmp_path / "harm").exists()


def test_a_file_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "batch.pt"
    torch.save((torch.arange(6), torch.arange(2), torch.tensor([[1, 2]])), path)
    with pytest.raises(ValueError, match="fit together"):
        read_batch(path)


@pytest.mark.skipif(not HISTOGRAMS.is_dir(), reason=f"no {HISTOGRAMS}")
@pytest.mark.parametrize("year", ["2021", "2022"])
def test_metas_own_histograms(year: str) -> None:
    for histogram in read_locality(HISTOGRAMS / f"{year}.txt"):
        mean = histogram.mean_reuse()
        assert (np.diff(mean) > 0).all()
        table = histogram.table_statistics(rows=5_000_000, pooling_factor=2.0)
        assert 1.6 < 1024 * 2.0 / table.unique_rows(1024) < 1.9
        reuse = histogram.samples * 2.0 / table.unique_at[-1]
        assert reuse == pytest.approx(histogram.lookups / histogram.unique_rows, rel=0.05)

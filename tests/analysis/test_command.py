"""`torchrec-bls analyse-tables`: what it prints and writes, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torchrec_bls.sharding import load_profile

from tests.analysis.sampled import lookup, one_id_each, random_weights, table, written
from tests.sharding.synthetic import small_profile
from torchrec_bls import CodecConfig, ErrorBound
from torchrec_bls.analysis import analysis as module
from torchrec_bls.cli.main import run
from torchrec_bls.codecs.compression import Compression, Measured
from torchrec_bls.codecs.rows import Codec
from torchrec_bls.distributed.codec_config import forward_of, unique_of


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    weights = random_weights()
    zeros = np.full_like(weights, 0.001)
    recorded = {
        "a <table> of a name that is long": lookup(weights, one_id_each(range(90))),
        "ids": lookup(weights, one_id_each([i % 10 for i in range(90)]), pooled=False),
        "weighted": lookup(weights, one_id_each(range(90))),
        "zeros": lookup(zeros, one_id_each(range(90))),
        "unused": lookup(weights, [[]]),
    }
    tables = [table(name, pooled=name != "ids", weighted=name == "weighted") for name in recorded]
    path = tmp_path / "samples"
    written(path, tables, [[[each] for each in recorded.values()]] * 2)
    return path


def analyse(samples: Path, *options: str, out: str = "bounds.json") -> int:
    file = str(samples.parent / out)
    return run(["analyse-tables", "--samples", str(samples), "--out", file, *options])


def test_prints_and_writes(samples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = [f"--{kind}={samples.parent / f'report.{kind}'}" for kind in ("json", "html")]
    assert analyse(samples, "--gbit", "10", *others) == 0
    text = capsys.readouterr().out
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "2 batches; link 1.25 GB/s (10 Gbit/s); bounds 0.01 small, 0.03 medium" in text
    assert "a <table> o..." in text and "100 x 8" in text
    assert "Warning: table 'zeros': 100% of the rows are zero at the bound 0.05" in text
    assert "Warning: table 'unused' stays float32: the samples have no ids of it" in text
    assert text.count("runner-up") == 4

    bounds = json.loads((samples.parent / "bounds.json").read_text())
    assert bounds["link"] == 1.25e9
    assert bounds["tables"]["ids"]["class"] == "large"
    assert bounds["tables"]["ids"]["bound"] == 0.05
    assert bounds["tables"]["ids"]["distinct_ids"] == 10
    assert set(bounds["tables"]["ids"]["measured"]) == {stages.value for stages in Compression}
    assert "unique" not in bounds["tables"]["weighted"]["measured"]

    report = json.loads((samples.parent / "report.json").read_text())
    (ids,) = (each for each in report["tables"] if each["name"] == "ids")
    assert ids["eta"] == 0 and ids["homo_index"] == 1
    assert ids["ranked"][0] == bounds["tables"]["ids"]["stages"]
    speeds = [ids["speed_up"][stages] for stages in ids["ranked"]]
    assert speeds == sorted(speeds, reverse=True)
    assert len(report["warnings"]) == 2

    page = (samples.parent / "report.html").read_text()
    assert "a &lt;table&gt; of a name that is long" in page and "<table> of" not in page
    assert "What stages bring" in page and "Ratio" in page
    assert "http" not in page


def test_the_bounds_are_a_configuration(samples: Path) -> None:
    names = ["a <table> of a name that is long", "ids", "weighted", "zeros", "unused"]
    # Over a link of a thousand bytes a second bytes alone matter, over a very fast one speed.
    assert analyse(samples, "--gbit", "8e-6") == 0
    file = samples.parent / "bounds.json"
    config = CodecConfig.from_file(file)
    assert forward_of(config, "unused") == Codec.FP32
    for name in names[:4]:
        codec = forward_of(config, name)
        assert isinstance(codec, ErrorBound)
        assert codec.bound == json.loads(file.read_text())["tables"][name]["bound"]
        assert unique_of(config, name)
    for name in names:
        assert forward_of(CodecConfig.from_file(file, 1e3), name) == forward_of(config, name)


@pytest.mark.parametrize("ranks", [2, None])
def test_the_link_is_the_profiles(
    ranks: int | None, samples: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = [] if ranks is None else ["--ranks", str(ranks)]
    assert analyse(samples, "--profile", "epyc-milan-2-cores", *others) == 0
    wanted = load_profile("epyc-milan-2-cores").link(ranks or 4)
    bounds = json.loads((samples.parent / "bounds.json").read_text())
    assert bounds["link"] == wanted
    assert bounds["ranks_per_core"] == (ranks or 4) / 2
    assert f"shared host, {'2 ranks' if ranks else '4 ranks, 2 on a core'})" in " ".join(
        capsys.readouterr().out.split()
    )


def measured_by_hand(*_: Any) -> dict[Compression, Measured]:
    return {stages: Measured(2 + i, 1e9, 2e9) for i, stages in enumerate(Compression)}


def test_the_figures_of_the_text(
    samples: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "measure", measured_by_hand)
    assert analyse(samples, "--gbit", "1", "--bounds", "0.02", "0.1", "0.2", "--probe", "0.1") == 0
    lines = capsys.readouterr().out.splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.startswith("ids "))
    assert lines[at].split()[:10] == [
        "ids",
        "100",
        "x",
        "8",
        "10",
        "90",
        "10",
        "0.000",
        "1.000",
        "0%",
    ]
    assert lines[at].split()[-2:] == ["large", "0.2"]
    assert " ".join(" ".join(lines[at + 1 : at + 3]).split()) == (
        "unique, Huffman: 2.58 times as fast (ratio 5.0, 1.00 GB/s encoded, 2.00 decoded); "
        "runner-up unique, fixed width, 2.29"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gbit", "0"], "--gbit is 0.0, but must be a positive number"),
        (["--gbit", "1", "--ranks-per-core", "0.5"], "--ranks-per-core is 0.5, but must be"),
        (["--gbit", "nan"], "--gbit is nan, but must be"),
        (["--gbit", "1", "--ranks", "2"], "--ranks belongs to --profile: leave it out with --gbit"),
        (["--gbit", "1", "--bounds", "3", "2", "1"], "the bounds are 3, 2 and 1, but must ascend"),
        (["--gbit", "1", "--probe", "0"], "the error bound is 0.0, but must be from"),
        (["--profile", "none"], "no profile 'none'"),
        (["--profile", "none.json"], "none.json"),
        (["--gbit", "1", "--html", "nowhere/page"], "nowhere"),
    ],
)
def test_bad_options(
    options: list[str], said: str, samples: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyse(samples, *options) == 1
    error = capsys.readouterr().err
    (line,) = (line for line in error.splitlines() if line.startswith("torchrec-bls"))
    assert line.startswith("torchrec-bls analyse-tables: ") and said in line


def test_a_profile_without_such_ranks(samples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = samples.parent / "profile.json"
    small_profile().save(profile)
    assert analyse(samples, "--profile", str(profile), "--ranks", "8") == 1
    assert "among 8 ranks: choose one of 2, 4" in capsys.readouterr().err


def test_a_link_is_needed_and_only_one(samples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options in ([], ["--gbit", "1", "--profile", "epyc-milan-2-cores"]):
        with pytest.raises(SystemExit) as exit_of:
            analyse(samples, *options)
        assert exit_of.value.code == 2
    assert "--gbit" in capsys.readouterr().err


def test_bad_samples(samples: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyse(samples / "nothing", "--gbit", "1", out="b.json") == 1
    assert "has no samples.json" in capsys.readouterr().err
    (samples / "batch-00001.npz").write_text("text")
    assert analyse(samples, "--gbit", "1") == 1
    assert "batch-00001.npz" in capsys.readouterr().err

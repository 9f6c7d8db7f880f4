"""Programs start that would run for minutes; .ci/run runs the others."""

import runpy
import sys

import pytest


# Other tests import some of them.
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize(
    "program",
    [
        "codecs.bounded",
        "direct.commits",
        "exchange.hot_path",
        "modules.commits",
        "planner.study_models",
        "serve.generator",
        "simulator.study",
        "simulator.transformer",
    ],
)
def test_a_program_tells_its_options(
    program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    # One sets it when it is imported. It is put back.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(SystemExit) as end:
        runpy.run_module(f"benchmarks.{program}", run_name="__main__")
    assert end.value.code == 0
    assert "--json" in capsys.readouterr().out

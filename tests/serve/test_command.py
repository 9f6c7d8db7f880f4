"""`torchrec-bls serve` makes the service that its options describe, and names a cure otherwise."""

import importlib.util
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.paths import ROOT
from torchrec_bls import Contract, Service
from torchrec_bls.cli.main import run
from torchrec_bls.serve import demo, service

MODULE = """
def build():
    return "the model"

absent = None
"""


class Recorder:
    """Stands for Service."""

    made: tuple[tuple[Any, ...], dict[str, Any]]
    error: Exception | None = None
    checkpoint_was_there = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        Recorder.made = arguments, options

    def run(self) -> None:
        Recorder.checkpoint_was_there = Path(self.made[0][1]).exists()
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Records services instead of making them, in a folder that has a model's module."""
    monkeypatch.setattr(service, "Service", Recorder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "some_ranker.py").write_text(MODULE)
    (tmp_path / "broken_ranker.py").write_text("import some_package_that_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    yield
    for name in ("some_ranker", "broken_ranker"):
        sys.modules.pop(name, None)


def test_defaults_are_those_of_the_service() -> None:
    assert run(["serve", "some_ranker:build", "--checkpoint", "weights"]) == 0
    (build, checkpoint), options = Recorder.made
    assert build() == "the model"
    assert checkpoint == Path("weights")
    assert options.pop("contract") == Contract()
    parameters = inspect.signature(Service).parameters
    assert options == {name: parameters[name].default for name in options}
    assert options["access_log"] is False


def test_options_reach_the_service() -> None:
    given = (
        "serve some_ranker:build --checkpoint weights --watch new --drain --deadline-ms 7.5 "
        "--max-samples 64 --max-body-mib 0.5 --name clicks --host 0.0.0.0 --port 80 --grpc-port 0 "
        "--socket tables --dense-features 13 --no-compile --access-log --workers 3 --front haproxy"
    )
    assert run(given.split()) == 0
    assert Recorder.made[1] == {
        "contract": Contract(7.5, 64, 1 << 19),
        "watch": Path("new"),
        "drain": True,
        "name": "clicks",
        "host": "0.0.0.0",
        "port": 80,
        "grpc_port": None,
        "path": Path("tables"),
        "dense_features": 13,
        "compile": False,
        "access_log": True,
        "workers": 3,
        "front": "haproxy",
    }


@pytest.mark.parametrize("name", ["deployment.yaml", "kserve.yaml"])
def test_examples_for_kubernetes_have_commands_that_reach_the_service(name: str) -> None:
    text = (ROOT / "examples/kubernetes" / name).read_text()
    [spec] = [
        each["spec"].get("template", each)["spec"]
        for each in yaml.safe_load_all(text)
        if each["kind"] in ("Deployment", "ServingRuntime")
    ]
    [container] = spec["containers"]
    program, *given = [*container["command"], *container["args"]]
    assert program == "torchrec-bls"
    assert run([each.replace("ranker:", "some_ranker:") for each in given]) == 0
    _, made = Recorder.made
    assert (made["workers"], made["front"], made["host"]) == (2, "haproxy", "0.0.0.0")
    ports = [each["containerPort"] for each in container["ports"]]
    assert made["port"] in ports
    assert {made["port"], made["grpc_port"]} >= set(ports)


def test_the_demo_brings_its_weights_and_takes_them_away() -> None:
    assert run(["serve", "--demo"]) == 0
    build, checkpoint = Recorder.made[0]
    assert build is demo.build
    assert Recorder.checkpoint_was_there
    assert not checkpoint.exists()


@pytest.mark.parametrize(
    "given, text",
    [
        ("", "give MODULE:FUNCTION, such as 'ranker:build', or --demo"),
        ("some_ranker:build --demo", "give MODULE:FUNCTION, such as 'ranker:build', or --demo"),
        ("some_ranker:build", "give --checkpoint PATH with MODULE:FUNCTION"),
        ("--demo --checkpoint weights", "give --checkpoint PATH with MODULE:FUNCTION"),
        ("some_ranker --checkpoint weights", "'some_ranker' is no MODULE:FUNCTION"),
        (":build --checkpoint weights", "':build' is no MODULE:FUNCTION"),
        ("some_ranker:missing --checkpoint weights", "'some_ranker' has no function 'missing'"),
        ("some_ranker:absent --checkpoint weights", "'some_ranker' has no function 'absent'"),
        ("no_ranker:build --checkpoint weights", "no module 'no_ranker' in "),
        ("no_ranker.models:build --checkpoint weights", "no module 'no_ranker' in "),
        ("broken_ranker:build --checkpoint weights", "No module named 'some_package_that_nobody"),
        ("--demo --deadline-ms 0", "deadline_ms is 0.0, but must be above 0"),
        ("--demo --max-samples -1", "max_samples is -1, but must be above 0"),
        ("--demo --max-body-mib 0", "max_body_bytes is 0, but must be above 0"),
    ],
)
def test_mistakes_are_said(given: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", *given.split()]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("torchrec-bls serve: ")
    assert text in err
    assert len(err.splitlines()) == 1


def test_a_service_that_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Recorder, "error", OSError("cannot listen at 127.0.0.1:8000"))
    assert run(["serve", "--demo"]) == 1
    assert capsys.readouterr().err == "torchrec-bls serve: cannot listen at 127.0.0.1:8000\n"


def test_packages_that_are_missing_have_a_cure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "uvloop" else found(name)
    )
    for name in [each for each in sys.modules if each.startswith("torchrec_bls.serve")]:
        monkeypatch.delitem(sys.modules, name)
    assert run(["serve", "--demo"]) == 1
    err = capsys.readouterr().err
    assert "packages that are not installed (uvloop): pip install 'torchrec-bls[serve]'" in err

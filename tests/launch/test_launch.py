"""The ranks of one host, started by torchrun without torchx, and commands that can't work."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from torchrec_bls import launch
from torchrec_bls.doctor.host.network import interfaces

pytestmark = pytest.mark.full

SOURCES = [
    path
    for folder in ("torchrec_bls", "sharding", "examples", "benchmarks", "tests")
    for path in (ROOT / folder).rglob("*.py")
]


def imported(path: Path) -> set[str]:
    """Returns the packages that a file imports anywhere."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def test_torchx_is_imported_by_its_component_alone() -> None:
    users = [path.relative_to(ROOT) for path in SOURCES if "torchx" in imported(path)]
    assert users == [Path("examples/torchx_hosts.py")]


def test_options_follow_from_the_way_to_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "way_to", lambda host: ("eth7", "10.0.0.2", "10.0.0.1"))
    options, environment = launch.torchrun_arguments("host1:29500", "3x8")
    assert " ".join(options) == (
        "--nnodes 3 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id torchrec-bls "
        "--rdzv-endpoint host1:29500 --rdzv-conf is_host=0 --local-addr 10.0.0.2"
    )
    assert environment == {"GLOO_SOCKET_IFNAME": "eth7"}
    monkeypatch.setattr(launch, "way_to", lambda host: ("eth7", "10.0.0.1", "10.0.0.1"))
    assert "is_host=1" in launch.torchrun_arguments("host1:29500", "3x8")[0]


def test_the_ranks_are_started_by_torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # On loopback, which is no way to other hosts, but the one that every machine has.
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys, pathlib\n"
        "said = ' '.join([os.environ['WORLD_SIZE'], *sys.argv[1:]])\n"
        "pathlib.Path(__file__).with_name(os.environ['RANK']).write_text(said)\n"
    )
    program = (
        "from torchrec_bls import launch\n"
        "launch.way_to = lambda host: ('lo', '127.0.0.1', '127.0.0.1')\n"
        "launch.main()\n"
    )
    options = ["--endpoint", "127.0.0.1:0", "-j", "1x2", str(script), "--steps", "3"]
    subprocess.run(
        [sys.executable, "-c", program, *options], check=True, timeout=120, env={**os.environ}
    )
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["2 --steps 3"] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--endpoint", "10.0.0.1:29500"], "no script"),
        (["--endpoint", "10.0.0.1", "x.py"], "'10.0.0.1', but is to be ADDRESS:PORT"),
        (["--endpoint", "10.0.0.1:29500", "-j", "2", "x.py"], "'2', but is to be HOSTSxRANKS"),
        (["--endpoint", "no.such.host.invalid:1", "x.py"], "can't be reached"),
        (["--endpoint", "127.0.0.1:1", "x.py"], "other hosts can reach"),
    ],
)
def test_commands_that_cannot_work(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        launch.main(arguments)
    assert message in capsys.readouterr().err


def test_the_own_address_leads_to_this_host() -> None:
    for name, address in interfaces().items():
        interface, own, store = launch.way_to(address)
        assert (own, store) == (address, address)
        assert interface == name

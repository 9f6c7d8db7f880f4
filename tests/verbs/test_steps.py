"""How a step of the verbs suite ends, and which address of a device it uses."""

from pathlib import Path

import pytest

from tests.verbs import suite
from tests.verbs.steps import Step, gid_option


def make_port(folder: Path, link: str, gids: dict[int, tuple[str, str]]) -> None:
    port = folder / "dev0" / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "gid_attrs" / "types").mkdir(parents=True)
    (port / "link_layer").write_text(f"{link}\n")
    for index, (gid, kind) in gids.items():
        (port / "gids" / str(index)).write_text(f"{gid}\n")
        (port / "gid_attrs" / "types" / str(index)).write_text(f"{kind}\n")


LOCAL = "fe80:0000:0000:0000:bc3b:beff:fe08:5d7b"
MAPPED = "0000:0000:0000:0000:0000:ffff:0a00:0001"


def test_address_is_that_of_ipv4_and_the_second_version(tmp_path: Path) -> None:
    gids = {0: (LOCAL, "RoCE v2"), 2: (MAPPED, "IB/RoCE v1"), 10: (MAPPED, "RoCE v2")}
    make_port(tmp_path, "Ethernet", gids)
    assert gid_option("dev0", tmp_path) == "-g 10"


def test_no_address_is_named_on_infiniband(tmp_path: Path) -> None:
    make_port(tmp_path, "InfiniBand", {0: (LOCAL, "IB/RoCE v1")})
    assert gid_option("dev0", tmp_path) == ""


def test_device_without_an_address_is_an_error(tmp_path: Path) -> None:
    make_port(tmp_path, "Ethernet", {0: (LOCAL, "RoCE v2")})
    with pytest.raises(RuntimeError, match="dev0 has no RoCE v2 address"):
        gid_option("dev0", tmp_path)


def play(steps: list[Step], out: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(suite, "steps_on", lambda device: steps)
    return suite.main(["dev0", "--out", str(out), "--short"])


def test_steps_get_the_device_and_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = Step("A step, of bash", 'echo "$TORCHREC_BLS_TEST_DEVICE"', 10)
    assert play([step], tmp_path, monkeypatch) == 0
    assert (tmp_path / "a-step-of-bash.log").read_text() == "dev0\n"
    printed = capsys.readouterr().out
    assert "1 of 1 steps passed" in printed and "need two devices" in printed


def test_failed_and_late_steps_are_told_with_their_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    late = tmp_path / "late"
    steps = [
        Step("fails", "echo why it fails; exit 3", 10),
        Step("hangs", f"(sleep 2; touch {late}) & sleep 60", 0.5),
        Step("passes", "sleep 2.5", 10),
    ]
    assert play(steps, tmp_path, monkeypatch) == 1
    printed = capsys.readouterr().out
    for expected in ("status 3", "    why it fails", "too late", "1 of 3 steps passed"):
        assert expected in printed
    assert not late.exists(), "what the step started in the background lives on"

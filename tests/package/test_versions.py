"""The check of the installed packages, on faked metadata."""

import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import metadata

import pytest

from tests.paths import ROOT
from torchrec_bls import _trios, _versions
from torchrec_bls._trios import BESIDE_TORCHREC, DEFAULT, TRIOS
from torchrec_bls._versions import (
    NativeModuleError,
    UntestedVersionsWarning,
    VersionError,
    check_native,
    check_packages,
    check_torch,
    examine_packages,
)

BESIDE = dict.fromkeys(
    (re.split("[<>=]", requirement)[0] for requirement in BESIDE_TORCHREC), "1.0"
)


def environment(
    torch: str = "",
    cpu: str = "",
    torchrec: str = "",
    *,
    cuda: str = "",
    without: str = "",
) -> Callable[[str], str]:
    """Returns the metadata of an environment; what is not named is not installed."""
    return lookup(
        {
            name: version
            for name, version in {
                "torch": torch,
                "fbgemm-gpu-cpu": cpu,
                "fbgemm-gpu": cuda,
                "torchrec": torchrec,
                **BESIDE,
            }.items()
            if version and name != without
        }
    )


def lookup(versions: Mapping[str, str]) -> Callable[[str], str]:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    return version


@pytest.fixture(autouse=True)
def nothing_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_versions, "_warned", False)
    for name in ("LOCAL_RANK", "RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("trio", TRIOS, ids=[trio.name for trio in TRIOS])
def test_tested_trios_are_accepted(trio: _trios.Trio) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for installed in (
            environment(*trio),
            environment(f"{trio.torch}+cpu", f"{trio.fbgemm}+cpu", f"{trio.torchrec}+cpu"),
            environment(f"{trio.torch}+cu130", torchrec=trio.torchrec, cuda=f"{trio.fbgemm}+cu130"),
            environment(f"{trio.torch}.post1", trio.fbgemm, trio.torchrec, cuda=trio.fbgemm),
            # Other patch releases.
            environment(*(re.sub(r"\d+$", "7", version) for version in trio)),
        ):
            check_torch(installed)
            check_packages(installed)


def test_the_environment_of_the_tests_is_a_tested_trio() -> None:
    report = examine_packages()
    assert (report.faults, report.untested, report.cure) == ([], "", "")


# What is installed, what the message says and the command that mends it. The table in
# docs/versions.md is made of these: `python -m tests.package.test_versions`.
CASES: dict[str, tuple[Callable[[str], str], list[str], str]] = {
    "nothing": (
        environment(),
        ["found torch not installed, fbgemm not installed, torchrec not installed; it needs torch"],
        "pip install 'torch==2.13.0' 'fbgemm-gpu-cpu==1.8.0' && "
        "pip install --no-deps 'torchrec==1.8.0'",
    ),
    "no torch": (
        environment("", "1.9.0", "1.9.2"),
        ["found torch not installed, fbgemm-gpu-cpu 1.9.0, torchrec 1.9.2; it needs torch 2.14.1"],
        "pip install 'torch==2.14.1'",
    ),
    "no fbgemm": (
        environment("2.14.1", "", "1.9.2"),
        ["fbgemm not installed", "needs torch 2.14.1, fbgemm-gpu-cpu (or fbgemm-gpu) 1.9.0"],
        "pip install 'fbgemm-gpu-cpu==1.9.0'",
    ),
    "no torchrec": (
        environment("2.12.1+cpu", "1.7.0"),
        ["torchrec not installed; it needs torch 2.12.1"],
        "pip install --no-deps 'torchrec==1.7.0'",
    ),
    "no torchmetrics": (
        environment("2.13.0", "1.8.0", "1.8.0", without="torchmetrics"),
        ["torchmetrics is not installed."],
        "pip install 'torchmetrics==1.0.3'",
    ),
    "no tensordict, torch of another minor": (
        environment("2.14.1", "1.8.0", "1.8.0", without="tensordict"),
        ["torch 2.14.1 and fbgemm-gpu-cpu 1.8.0 are not a pair", "tensordict is not installed."],
        "pip uninstall -y fbgemm-gpu-cpu && "
        "pip install 'fbgemm-gpu-cpu==1.9.0' 'tensordict>=0.10,<1' && "
        "pip install --no-deps 'torchrec==1.9.2'",
    ),
    "older than the oldest": (
        environment("2.10.0", "1.5.0", "1.5.0"),
        ["torch 2.11.0 is the oldest that is supported."],
        "pip uninstall -y fbgemm-gpu-cpu && pip install 'torch==2.13.0' 'fbgemm-gpu-cpu==1.8.0' && "
        "pip install --no-deps 'torchrec==1.8.0'",
    ),
    "old torch, tested others": (
        environment("2.10.0", "1.9.0", "1.9.2"),
        [
            "torch 2.11.0 is the oldest that is supported.",
            "torch 2.10.0 and fbgemm-gpu-cpu 1.9.0 are not a pair",
        ],
        "pip install 'torch==2.14.1'",
    ),
    "fbgemm of an older torch": (
        environment("2.13.0+cpu", "1.7.0", "1.8.0"),
        [
            "torch 2.13.0+cpu and fbgemm-gpu-cpu 1.7.0 are not a pair: fbgemm 1.X is built for "
            "torch 2.(X+5) and fails with an undefined symbol under any other.",
            "fbgemm-gpu-cpu 1.7.0 and torchrec 1.8.0 are not a pair",
        ],
        "pip uninstall -y fbgemm-gpu-cpu && pip install 'fbgemm-gpu-cpu==1.8.0'",
    ),
    "torchrec of a newer fbgemm": (
        environment("2.13.0", "1.8.0", "1.9.2"),
        [
            "fbgemm-gpu-cpu 1.8.0 and torchrec 1.9.2 are not a pair: torchrec 1.X goes with "
            "fbgemm 1.X."
        ],
        "pip install --no-deps 'torchrec==1.8.0'",
    ),
    "torch upgraded alone to one not tried": (
        environment("2.15.0", "1.9.0", "1.9.2"),
        ["torch 2.15.0 and fbgemm-gpu-cpu 1.9.0 are not a pair"],
        "pip install 'torch==2.14.1'",
    ),
    "CUDA build laid over the CPU build": (  # by `pip install torchrec` without --no-deps
        environment("2.13.0+cpu", "1.8.0", "1.8.0", cuda="1.9.0"),
        [
            "fbgemm-gpu-cpu 1.8.0, fbgemm-gpu 1.9.0",
            "torch 2.13.0+cpu and fbgemm-gpu 1.9.0 are not a pair",
        ],
        "pip uninstall -y fbgemm-gpu-cpu fbgemm-gpu && pip install 'fbgemm-gpu-cpu==1.8.0'",
    ),
    "CUDA build of another torch": (
        environment("2.14.1+cu130", "", "1.9.2", cuda="1.8.0"),
        ["torch 2.14.1+cu130 and fbgemm-gpu 1.8.0 are not a pair"],
        "pip uninstall -y fbgemm-gpu && pip install 'fbgemm-gpu==1.9.0'",
    ),
    "nightly fbgemm": (
        environment("2.14.1", "2026.9.1", "1.9.2"),
        ["torch 2.14.1 and fbgemm-gpu-cpu 2026.9.1 are not a pair"],
        "pip uninstall -y fbgemm-gpu-cpu && pip install 'fbgemm-gpu-cpu==1.9.0'",
    ),
    "a version of no known form": (
        environment("2.14.1", "1.9.0", "unknown"),
        ["fbgemm-gpu-cpu 1.9.0 and torchrec unknown are not a pair"],
        "pip install --no-deps 'torchrec==1.9.2'",
    ),
    "torch 3": (
        environment("3.0.0", "1.9.0", "1.9.2"),
        ["torch 3.0.0 and fbgemm-gpu-cpu 1.9.0 are not a pair"],
        "pip install 'torch==2.14.1'",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_fit_is_refused_with_the_cure(name: str) -> None:
    installed, says, cure = CASES[name]
    with pytest.raises(VersionError) as raised:
        check_packages(installed)
    message = str(raised.value)
    for sentence in says:
        assert sentence in message
    assert message.endswith(f"\nMend it with: {cure}")


NEWER = {
    "all newer": (
        environment("2.15.0+cpu", "1.10.0", "1.10.0"),
        "torch 2.15.0+cpu, fbgemm-gpu-cpu",
    ),
    "much newer, with CUDA": (environment("2.21.0", "", "1.16.0", cuda="1.16.0"), "torch 2.21.0"),
    "pre-releases": (
        environment("2.15.0.dev20261101", "1.10.0rc1", "1.10.0a1"),
        "torch 2.15.0.dev",
    ),
}


@pytest.mark.parametrize("name", NEWER)
def test_what_is_newer_than_all_tested_warns_once_and_goes_on(name: str) -> None:
    installed, found = NEWER[name]
    with pytest.warns(UntestedVersionsWarning) as warned:
        check_torch(installed)
        check_packages(installed)
        check_packages(installed)
    (warning,) = warned
    assert "newer than all that it was tested with, and goes on" in str(warning.message)
    assert "The newest tested are torch 2.14.1, fbgemm-gpu-cpu (or fbgemm-gpu) 1.9.0" in str(
        warning.message
    )
    report = examine_packages(installed)
    assert found in report.untested and report.faults == []
    assert "'torch==2.14.1' 'fbgemm-gpu" in report.cure


@pytest.mark.parametrize(
    "installed",
    [
        environment("2.13.0", "1.8.0", "1.8.0"),
        environment("2.12.1", "1.8.0", "1.8.0"),
        environment("2.13.0", "1.7.0", "1.8.0"),
        environment("2.14.1", "1.9.0"),
        lookup({"torch": "2.13.0"}),
    ],
)
def test_torch_alone_is_enough_for_the_first_check(installed: Callable[[str], str]) -> None:
    check_torch(installed)


def test_another_torch_is_refused_by_the_first_check() -> None:
    with pytest.raises(VersionError) as raised:
        check_torch(lookup({"torch": "2.10.0"}))
    assert str(raised.value) == (
        "torchrec_bls found torch 2.10.0; it needs torch 2.11.0 to 2.14.1.\n"
        "Mend it with: pip install 'torch==2.13.0'"
    )
    with pytest.raises(VersionError, match="found torch not installed; it needs torch 2"):
        check_torch(lookup({}))
    with pytest.raises(VersionError, match=r"torch 2\.10\.0 and fbgemm-gpu-cpu 1\.8\.0 are"):
        check_torch(environment("2.10.0", "1.8.0", "1.8.0"))


def test_a_newer_torch_alone_is_warned_of() -> None:
    with pytest.warns(UntestedVersionsWarning, match=r"found torch 2\.15\.0, newer than all"):
        check_torch(lookup({"torch": "2.15.0"}))


@pytest.mark.parametrize(
    ("ranks", "warnings_given"),
    [
        ({"LOCAL_RANK": "0", "RANK": "0"}, 1),
        ({"LOCAL_RANK": "0", "RANK": "4"}, 1),  # of another host, with an installation of its own
        ({"LOCAL_RANK": "1", "RANK": "1"}, 0),
        ({"RANK": "0"}, 1),
        ({"RANK": "1"}, 0),
    ],
)
def test_one_rank_of_a_host_warns(
    monkeypatch: pytest.MonkeyPatch, ranks: dict[str, str], warnings_given: int
) -> None:
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        check_torch(lookup({"torch": "2.15.0"}))
    assert len(warned) == warnings_given


def test_errors_are_import_errors() -> None:
    assert issubclass(VersionError, ImportError)
    assert issubclass(NativeModuleError, ImportError)


def test_native_module_that_is_not_built_names_the_command() -> None:
    def fail(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}")

    with pytest.raises(NativeModuleError) as raised:
        check_native(fail)
    assert "No module named 'torchrec_bls._native'" in str(raised.value)
    assert "make build" in str(raised.value)
    assert "pip install --no-build-isolation -e ." in str(raised.value)


def test_trios_are_in_order_and_pairs() -> None:
    assert DEFAULT in TRIOS
    minors = [[int(version.split(".")[1]) for version in trio] for trio in TRIOS]
    assert minors == sorted(minors)
    assert all(torch - 5 == fbgemm == torchrec for torch, fbgemm, torchrec in minors)


def test_trios_can_be_printed_without_any_package() -> None:
    """As the Makefile does, before anything is installed."""

    def printed(*arguments: str) -> list[str]:
        command = [sys.executable, "-I", "-S", _trios.__file__, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()

    assert printed("--names") == [trio.name for trio in TRIOS]
    assert printed()[:2] == ["torch==2.13.0", "fbgemm-gpu-cpu==1.8.0"]
    assert printed("2.14") == ["torch==2.14.1", "fbgemm-gpu-cpu==1.9.0", *BESIDE_TORCHREC]
    assert printed("2.14", "--torchrec") == ["torchrec==1.9.2"]
    wrong = [sys.executable, _trios.__file__, "2.10"]
    process = subprocess.run(wrong, capture_output=True, text=True)
    assert process.returncode == 2
    assert "there is no trio '2.10', but 2.11, 2.12, 2.13, 2.14" in process.stderr


def table() -> str:
    """Returns the table of docs/versions.md."""

    def row(installed: Callable[[str], str], message: str, cure: str) -> str:
        found = examine_packages(installed)
        return f"| {_of_trio(found.found)} | {message} | `{cure}` |"

    rows = ["| installed | message | cure |", "|---|---|---|"]
    for installed, _, cure in CASES.values():
        # What the message says first, what was found and needed, are the other columns.
        told = examine_packages(installed).faults
        text = " ".join(fault for fault in told if not fault.startswith("torchrec_bls found"))
        rows.append(row(installed, text or "found …; it needs …", cure))
    for installed, _ in NEWER.values():
        rows.append(row(installed, "a warning, once", examine_packages(installed).cure))
    return "\n".join(rows) + "\n"


def _of_trio(found: str) -> str:
    return found.replace(" not installed", " -")


def test_the_table_of_the_documents_is_of_these_cases() -> None:
    assert table() in (ROOT / "docs" / "versions.md").read_text()


if __name__ == "__main__":
    print(table(), end="")

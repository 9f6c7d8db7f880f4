"""What the doctor says of torch, fbgemm and torchrec."""

import sys
from importlib import metadata

import pytest

from torchrec_bls.doctor.finding import Status
from torchrec_bls.doctor.packages import names_finding, packages_finding


def newer(name: str) -> str:
    versions = {"torch": "2.15.0", "fbgemm-gpu-cpu": "1.10.0", "torchrec": "1.10.0"}
    if name == "fbgemm-gpu":
        raise metadata.PackageNotFoundError(name)
    return versions.get(name, "1.0")


def program(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_untested_packages_are_a_warning() -> None:
    finding = packages_finding(newer)
    assert finding.status is Status.WARNING
    assert "found torch 2.15.0, fbgemm-gpu-cpu 1.10.0, torchrec 1.10.0, newer" in finding.text
    assert "pip install 'torch==2.14.1'" in finding.cure


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("", Status.OK, "all that are used of torch, fbgemm and torchrec are there"),
        ("print('a:B._c\\nd')", Status.PROBLEM, "the installed packages lack a:B._c, d"),
        ("raise ImportError('undefined symbol')", Status.PROBLEM, "ImportError: undefined symbol"),
        ("raise SystemExit(7)", Status.PROBLEM, "exit status 7"),
    ],
)
def test_missing_names_are_a_problem(code: str, status: Status, text: str) -> None:
    finding = names_finding(newer, program=program(code))
    assert (finding.subject, finding.status) == ("private names", status)
    assert text in finding.text
    assert ("pip install 'torch==2.14.1'" in finding.cure) == (status is Status.PROBLEM)


def test_an_import_that_does_not_end_is_a_problem() -> None:
    sleep = program("import time; time.sleep(600)")
    finding = names_finding(newer, deadline=0.5, program=sleep)
    assert finding.status is Status.PROBLEM
    assert finding.text == "still importing torchrec after 0.5 s"

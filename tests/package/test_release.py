"""The version is the same wherever it is said."""

import re
from importlib import metadata

import torchrec_bls
from tests.paths import ROOT


def version_of_project() -> str:
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    return version


def test_the_package_says_its_version() -> None:
    assert torchrec_bls.__version__ == metadata.version("torchrec-bls")
    assert "__version__" in dir(torchrec_bls)


def test_the_changelog_begins_with_the_version_of_the_project() -> None:
    unreleased, *released = re.findall(
        r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    assert unreleased == ("Unreleased", "")
    newest, _ = released[0]
    assert newest == version_of_project()
    assert all(day for _, day in released)

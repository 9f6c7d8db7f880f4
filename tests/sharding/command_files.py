"""A small model and profile as files, for the commands that read them."""

import json
from pathlib import Path

import pytest

from tests.sharding.synthetic import small_profile
from torchrec_bls.cli.main import run

TABLES = [
    {"name": "users", "rows": 5000, "dim": 64, "pooling_factor": 2.5},
    {"name": "items", "rows": 9000, "dim": 32, "pooling_factor": 8.0},
]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The folder of model.json and profile.json."""
    (tmp_path / "model.json").write_text(json.dumps({"tables": TABLES}))
    small_profile().save(tmp_path / "profile.json")
    return tmp_path


def run_on(files: Path, command: str, *others: str, ranks: int = 2) -> int:
    """Runs a sub-command for ranks with batches of 64, and returns its exit status."""
    model, profile = str(files / "model.json"), str(files / "profile.json")
    arguments = ["--model", model, "--profile", profile, "--ranks", str(ranks), "--batch", "64"]
    return run([command, *arguments, *others])

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from torchrec_bls.sharding.costs.profile import (
    ProfileError,
    load_profile,
    profile_from_json,
    shipped_profiles,
)

from tests.sharding.synthetic import changed, small_profile


def test_a_saved_profile_comes_back(tmp_path: Path) -> None:
    profile = small_profile()
    own = dataclasses.replace(profile.lookups[True, "forward"], op_us=7.0)
    lookups = {**profile.lookups, (True, "by_exchange"): own}
    profile = dataclasses.replace(profile, lookups=lookups)
    profile.save(tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json").as_json() == profile.as_json()


def test_profiles_of_version_1_have_no_host_costs() -> None:
    record = changed(small_profile(), ["version"], 1)
    del record["hosts"]
    assert profile_from_json(json.dumps(record), "old").hosts == {}


def test_profiles_of_before_may_have_times_of_dense_layers() -> None:
    record = small_profile().as_json()
    of_before = {**record, "dense": {"cache_bytes": [1e6], "kinds": {}}}
    assert profile_from_json(json.dumps(of_before), "old").as_json() == record


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["format"], "something", "make one with"),
        (["version"], 3, "version 3, and this package reads 1 and 2: make one with"),
        (["version"], KeyError, "version None"),
        (["machine", "kind"], "cuda", "kind 'cuda', and the plan is for 'cpu'"),
        (["machine", "cores"], "4", "machine.cores: expected int, got '4'"),
        (["colour"], "red", "'colour' is unknown"),
        (
            ["hosts", 0, "costs", "step"],
            -1,
            r"costs\['step'\]: expected float >= 0.0, got -1",
        ),
        (["hosts", 0, "costs", "colour"], 1, "costs have 'colour', but must be of lookup,"),
        (["hosts", 0, "costs", "feature"], float("nan"), "is no JSON"),
        (["hosts", 0, "interval_log"], [0.1, 0.2], "but must have 0 within it"),
        (
            ["hosts", 0, "between_plans_log"],
            -0.1,
            "between_plans_log: expected float >= 0",
        ),
        (["hosts", 0, "world_size"], 1, r"hosts\[0\].world_size: expected int >= 2, got 1"),
        (["hosts", 0, "world_size"], 4, r"hosts has .*, 4\) twice"),
        (["hosts", 0, "backend"], KeyError, r"hosts\[0\]: 'backend' is missing: make one"),
        (["lookups", "pooled"], KeyError, "lookups: 'pooled' is missing"),
        (
            ["lookups", "pooled", "forward", "op_us"],
            -1.0,
            r"pooled\['forward'\].op_us: expected",
        ),
        (["lookups", "pooled", "forward", "op_us"], "soon", "expected float, got 'soon'"),
        (["lookups", "pooled", "forward", "interval_log"], [0.1, 0.2], "interval_log"),
        (["lookups", "pooled", "forward", "coefficients_us", "lookup"], KeyError, "expected"),
        (
            ["lookups", "pooled", "forward", "calibrated_log2", "rows"],
            [9, 3],
            "must ascend",
        ),
        (["lookups", "pooled", "sideways"], {}, "sideways"),
        (["collectives", 1, "world_size"], 2, r"collectives has \(.*, 2\) twice"),
        (
            ["collectives", 0, "world_size"],
            1,
            "world_size: expected int >= 2, got 1",
        ),
        (["collectives", 0, "imbalance"], 1.5, "imbalance: expected float <= 1.0, got 1.5"),
        (["collectives", 0, "operation"], "broadcast", "broadcast"),
        (["collectives", 0, "curve", "kind"], "spline", "spline"),
        (["memory", "row_us"], [0.0, 1.0], r"memory.row_us\[0\]: expected float > 0.0, got 0.0"),
        (["memory", "buffer_bytes"], [2.0, 1.0], "ascending"),
        (["memory", "row_us"], [1.0], "not equally many"),
    ],
)
def test_profiles_that_cannot_be_used(
    tmp_path: Path, path: list[Any], value: Any, message: str
) -> None:
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(changed(small_profile(), path, value)))
    with pytest.raises(ProfileError, match=message):
        load_profile(file)


def test_a_file_of_something_else(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    for text, message in (("{", "no JSON"), ("[]", "not a torchrec-bls profile")):
        file.write_text(text)
        with pytest.raises(ProfileError, match=message):
            load_profile(file)
    with pytest.raises(FileNotFoundError):
        load_profile(tmp_path / "none.json")


def test_profiles_that_ship() -> None:
    assert shipped_profiles() == ["epyc-milan-2-cores"]
    for name in shipped_profiles():
        profile = load_profile(name)
        assert profile.machine.kind == "cpu"
        assert set(profile.lookups) == {
            (p, d) for p in (True, False) for d in ("forward", "backward")
        }
    with pytest.raises(ProfileError, match="epyc-milan-2-cores"):
        load_profile("another-machine")

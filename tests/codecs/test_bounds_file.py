"""The file of bounds by table."""

import json
from pathlib import Path
from typing import Any

import pytest

from torchrec_bls import CodecConfig, Decay, ErrorBound
from torchrec_bls.codecs.rows import Codec

GOOD: dict[str, Any] = {
    "version": 1,
    "decay": {"start": 2.0, "iterations": 5000, "steps": 4},
    "backward": "bf16",
    "tables": {"a": {"bound": 0.01, "class": "small"}, "b": {"codec": "fp16"}},
}


def written(path: Path, **changes: Any) -> Path:
    content = {**GOOD, **changes}
    path.write_text(json.dumps({name: value for name, value in content.items() if value != "no"}))
    return path


def test_tables_have_the_bounds_and_codecs_of_the_file(tmp_path: Path) -> None:
    config = CodecConfig.from_file(written(tmp_path / "bounds.json"))
    assert config.forward_of("a") == ErrorBound(0.01, Decay(2.0, 5000, 4))
    assert config.forward_of("b") == Codec.FP16
    assert config.backward_of("a") == Codec.BF16
    assert config.decays
    plain = CodecConfig.from_file(written(tmp_path / "plain.json", decay=None, backward="no"))
    assert plain.forward_of("a") == ErrorBound(0.01)
    assert plain.backward_of("b") == Codec.FP32
    assert not plain.decays
    with pytest.raises(ValueError, match="table 'c' has no forward codec: name one for every"):
        config.forward_of("c")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, "is of version 2, but this package reads version 1: write it again"),
        ({"version": "no"}, "does not say its version"),
        ({"tables": []}, "names no tables"),
        ({"tables": {}}, "names no tables"),
        ({"tables": {"a": 0.01}}, "table 'a' has 0 of bound and codec, but needs one of them"),
        ({"tables": {"a": {"bound": 1, "codec": "fp16"}}}, "table 'a' has 2 of bound and codec"),
        ({"tables": {"a": {"bound": -1}}}, "table 'a': the error bound is -1, but must be from"),
        ({"tables": {"a": {"bound": "1"}}}, "table 'a': the error bound is '1'"),
        ({"tables": {"a": {"codec": "zip"}}}, "codec of table 'a' is 'zip', but must be one of"),
        ({"decay": {"start": 2.0}}, "decay: .*missing .* 'iterations'"),
        ({"decay": {"start": 2.0, "iterations": 5, "by": 1}}, "decay: .*unexpected .* 'by'"),
        ({"decay": 2}, "decay is 2, but must be an object"),
        ({"backward": "zip"}, "the backward codec is 'zip', but must be one of"),
    ],
)
def test_a_file_of_another_shape_is_refused(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        CodecConfig.from_file(written(tmp_path / "bounds.json", **changes))


@pytest.mark.parametrize("text", ["", "{", "[1]", "7", "\xff"])
def test_what_is_no_such_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bounds.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"bounds.json (is no JSON|does not say its version)"):
        CodecConfig.from_file(path)
    with pytest.raises(FileNotFoundError):
        CodecConfig.from_file(tmp_path / "nothing.json")

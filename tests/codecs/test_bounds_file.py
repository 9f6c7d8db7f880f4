"""The file of bounds by table."""

import json
from pathlib import Path
from typing import Any

import pytest

from torchrec_bls import CodecConfig, Decay, ErrorBound
from torchrec_bls.codecs.rows import Codec
from torchrec_bls.distributed.codec_config import backward_of, forward_of, has_decay, unique_of

GOOD: dict[str, Any] = {
    "version": 1,
    "decay": {"start": 2.0, "iterations": 5000, "steps": 4},
    "backward": "bf16",
    "tables": {"a": {"bound": 0.01, "class": "small"}, "b": {"codec": "fp16"}},
}


# Of a fast link "unique" is the best, of a slow one Huffman's code.
MEASURED: dict[str, Any] = {
    "as they are": {"ratio": 1.0, "encode": 8e9, "decode": 8e9},
    "unique": {"ratio": 2.0, "encode": 8e9, "decode": 8e9},
    "unique, Huffman": {"ratio": 30.0, "encode": 1e9, "decode": 2e9},
}
FAST, SLOW = 1e9, 1e8


def written(path: Path, **changes: Any) -> Path:
    content = {**GOOD, **changes}
    path.write_text(json.dumps({name: value for name, value in content.items() if value != "no"}))
    return path


def test_tables_have_the_bounds_and_codecs_of_the_file(tmp_path: Path) -> None:
    config = CodecConfig.from_file(written(tmp_path / "bounds.json"))
    assert forward_of(config, "a") == ErrorBound(0.01, Decay(2.0, 5000, 4))
    assert forward_of(config, "b") == Codec.FP16
    assert backward_of(config, "a") == Codec.BF16
    assert has_decay(config)
    plain = CodecConfig.from_file(written(tmp_path / "plain.json", decay=None, backward="no"))
    assert forward_of(plain, "a") == ErrorBound(0.01)
    assert backward_of(plain, "b") == Codec.FP32
    assert not has_decay(plain)
    with pytest.raises(ValueError, match="table 'c' has no forward codec: name one for every"):
        forward_of(config, "c")


def test_tables_have_the_stages_of_the_file(tmp_path: Path) -> None:
    names = {"a": "as they are", "u": "unique", "f": "unique, fixed width", "h": "unique, Huffman"}
    tables: dict[str, Any] = {
        name: {"bound": 0.03, "stages": stages} for name, stages in names.items()
    }
    tables["c"] = {"codec": "fp16", "stages": "unique"}
    tables["none"] = {"bound": 0.03}
    path = written(tmp_path / "bounds.json", tables=tables, decay=None)
    config = CodecConfig.from_file(path)
    assert {name: forward_of(config, name) for name in tables} == {
        "a": Codec.FP32,
        "u": Codec.FP32,
        "f": ErrorBound(0.03, fixed_width=True),
        "h": ErrorBound(0.03),
        "c": Codec.FP16,
        "none": ErrorBound(0.03),
    }
    assert [name for name in tables if unique_of(config, name)] == ["u", "f", "h", "c"]
    # Nothing was measured by which others could be chosen.
    assert CodecConfig.from_file(path, SLOW) == config


def test_the_fastest_stages_are_chosen_for_the_link(tmp_path: Path) -> None:
    tables = {
        "auto": {"bound": 0.03, "stages": "auto", "measured": MEASURED},
        "named": {"bound": 0.03, "stages": "as they are", "measured": MEASURED},
        "unnamed": {"bound": 0.03, "measured": MEASURED},
        "fp16": {"codec": "fp16"},
    }

    def chosen(link: float | None, of_file: float | str = "no") -> dict[str, Any]:
        path = written(tmp_path / "bounds.json", tables=tables, link=of_file, decay=None)
        config = CodecConfig.from_file(path, link)
        return {name: (forward_of(config, name), unique_of(config, name)) for name in tables}

    huffman, unique = (ErrorBound(0.03), True), (Codec.FP32, True)
    others: dict[str, Any] = {"fp16": (Codec.FP16, False)}
    assert chosen(SLOW) == {"auto": huffman, "named": huffman, "unnamed": huffman, **others}
    assert chosen(FAST, SLOW) == {"auto": unique, "named": unique, "unnamed": unique, **others}
    # The file's own link is for "auto" alone.
    as_named: dict[str, Any] = {"named": (Codec.FP32, False), "unnamed": (ErrorBound(0.03), False)}
    assert chosen(None, FAST) == {"auto": unique, **as_named, **others}
    # Eight ranks on a core encode so slowly that nothing but float32 pays.
    path = written(tmp_path / "bounds.json", tables=tables, ranks_per_core=8, decay=None)
    assert not any(unique_of(CodecConfig.from_file(path, FAST), name) for name in ("auto", "named"))
    assert unique_of(CodecConfig.from_file(path, FAST, ranks_per_core=1), "auto")
    with pytest.raises(ValueError, match=r"bounds.json: ranks_per_core is 0.5, but must be"):
        CodecConfig.from_file(path, FAST, 0.5)
    with pytest.raises(ValueError, match='has stages "auto", but no link is known: give from_file'):
        chosen(None)
    for of_call, of_file, wrong in (
        (-1, "no", "bounds.json: the link has -1 bytes per second"),
        (None, "fast", "bounds.json: link: expected float, got 'fast'"),
    ):
        with pytest.raises(ValueError, match=wrong):
            chosen(of_call, of_file)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            {"bound": 1, "stages": "zip"},
            "stages are 'zip', but must be one of 'as they",
        ),
        ({"bound": 1, "stages": 7}, "stages: expected str, got 7"),
        ({"bound": 1, "stages": ["unique"]}, r"stages: expected str, got \['unique'\]"),
        ({"bound": 1, "stages": "auto"}, 'has stages "auto", but no "measured"'),
        ({"bound": 1, "stages": "auto", "measured": {}}, 'has stages "auto", but no "measured"'),
        ({"bound": 1, "measured": 7}, "measured: expected object, got 7"),
        ({"bound": 1, "measured": {"zip": MEASURED["unique"]}}, "stages are 'zip', but must"),
        ({"bound": 1, "measured": {"unique": 7}}, r"measured\['unique'\]: expected object, got 7"),
        ({"bound": 1, "measured": {"unique": {}}}, r"measured\['unique'\]: 'ratio' is missing"),
        (
            {"bound": 1, "measured": {"unique": {**MEASURED["unique"], "ratio": 0}}},
            r"measured\['unique'\]: ratio is 0.0, but must be a positive number",
        ),
        (
            {"codec": "fp16", "stages": "unique, Huffman"},
            "has a codec, and stages 'unique, Huffman', which need a bound",
        ),
        ({"stages": "unique"}, "has 0 of bound and codec, but needs one of them"),
    ],
)
def test_stages_that_cannot_be(table: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = written(tmp_path / "bounds.json", tables={"a": table})
    with pytest.raises(ValueError, match=rf"bounds.json: tables\['a'\].*{said}"):
        CodecConfig.from_file(path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 2}, "has version 2, and this package reads 1: write it by `torchrec-bls"),
        ({"version": "no"}, "has version None, and this package reads 1"),
        ({"tables": []}, "tables: expected object"),
        ({"tables": {}}, "names no tables"),
        ({"tables": {"a": 0.01}}, r"tables\['a'\]: expected object, got 0.01"),
        (
            {"tables": {"a": {"bound": 1, "codec": "fp16"}}},
            "it has 2 of bound and codec",
        ),
        ({"tables": {"a": {"bound": -1}}}, r"tables\['a'\].bound: expected float > 0.0, got -1"),
        ({"tables": {"a": {"bound": "1"}}}, r"tables\['a'\].bound: expected float, got '1'"),
        ({"tables": {"a": {"codec": "zip"}}}, "codec of table 'a' is 'zip', but must be one of"),
        ({"decay": {"start": 2.0}}, "decay: 'iterations' is missing"),
        ({"decay": {"start": 2.0, "iterations": 5, "by": 1}}, "decay: 'by' is unknown"),
        ({"decay": 2}, "decay: expected object, got 2"),
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
    with pytest.raises(ValueError, match=r"bounds.json is (no JSON|not a JSON object)"):
        CodecConfig.from_file(path)
    with pytest.raises(FileNotFoundError):
        CodecConfig.from_file(tmp_path / "nothing.json")


def test_no_table_is_encoded_where_that_costs_the_others_more(tmp_path: Path) -> None:
    large = {"as they are": {"ratio": 1.0, "encode": 4e9, "decode": 4e9}}
    small = {**large, "unique": {"ratio": 100.0, "encode": 5e10, "decode": 5e10}}
    tables = {
        name: {"bound": 0.03, "measured": small if name == "small" else large}
        for name in ("small", "large", "second", "third")
    }
    path = written(tmp_path / "bounds.json", tables=tables, decay=None)
    assert not unique_of(CodecConfig.from_file(path, 1e9), "small")
    del tables["second"], tables["third"]
    written(path, tables=tables, decay=None)
    assert unique_of(CodecConfig.from_file(path, 1e9), "small")

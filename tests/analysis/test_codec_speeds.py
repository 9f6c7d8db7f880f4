"""What codecs of rows are said to make of rows, beside what they do."""

import pytest
import torch

from torchrec_bls.analysis.codec_speeds import codecs_named, measure_codecs
from torchrec_bls.codecs.rows import Codec, encode

ROUNDING = [codec for codec in Codec if codec is not Codec.FP32]


@pytest.mark.parametrize("columns", [4, 64])
def test_bytes_are_those_of_encoded_rows(columns: int) -> None:
    rows = torch.randn(10, columns)
    for codec, speed in measure_codecs(ROUNDING, columns).items():
        bytes_of_row = columns * speed.bytes_per_value + speed.row_overhead_bytes
        assert encode(rows, codec).numel() == 10 * bytes_of_row


def test_all_of_them_take_time() -> None:
    speeds = measure_codecs(ROUNDING, 64)
    assert list(speeds) == ROUNDING
    for speed in speeds.values():
        assert speed.encode_us_per_value > 0 and speed.decode_us_per_value > 0


def test_names_are_those_of_codec_configs() -> None:
    assert codecs_named(["uint4", "fp32"]) == [Codec.UINT4, Codec.FP32]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["zip"], "codec 'zip' is none of fp32, fp16, bf16, uint8, uint4, uint2"),
        (["UINT8"], "codec 'UINT8' is none of"),
        ([""], "codec '' is none of"),
        (["uint8", "fp16", "uint8"], "codecs are uint8, fp16, uint8, and one is there twice"),
    ],
)
def test_names_of_no_codec(names: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        codecs_named(names)

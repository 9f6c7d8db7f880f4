"""What codecs of rows are said to make of rows, beside what they do."""

import pytest
import torch
from torchrec_bls.sharding.calibration.codec_costs import measure_codecs
from torchrec_bls.sharding.simulation.wire.codecs import FP32

from torchrec_bls.codecs.rows import Codec, encode

NAMES = [codec.name.lower() for codec in Codec]


@pytest.mark.parametrize("columns", [4, 64])
def test_bytes_are_those_of_encoded_rows(columns: int) -> None:
    rows = torch.randn(10, columns)
    for codec, costs in zip(Codec, measure_codecs(NAMES, columns), strict=True):
        if codec is not Codec.FP32:
            bytes_of_row = columns * costs.bytes_per_value + costs.row_overhead_bytes
            assert encode(rows, codec).numel() == 10 * bytes_of_row


def test_all_but_float32_take_time() -> None:
    costs = measure_codecs(NAMES, 64)
    assert [each.name for each in costs] == NAMES
    for each in costs:
        takes_time = each.encode_us_per_value > 0 and each.decode_us_per_value > 0
        assert takes_time or each == FP32


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
        measure_codecs(names, 64)

"""The costs of a simulation's codecs, measured on this machine."""

from statistics import median_low
from typing import Any


def codec_costs(text: str, workload: Any) -> list[Any]:
    """Returns the CodecCosts of codecs, whose names have commas between them.

    Args:
        text: names of codecs, separated by commas.
        workload: tables whose rows are encoded. Rows of the median width are timed.

    Raises:
        ValueError: a codec's name is unknown.
    """
    from torchrec_bls.sharding.simulation.wire.codecs import FP32, CodecCosts

    names = [name.strip() for name in text.split(",")]
    if names == [FP32.name]:
        return [FP32]
    # Imports torch, which takes seconds.
    from torchrec_bls.analysis.codec_speeds import codecs_named, measure_codecs

    codecs = dict(zip(names, codecs_named(names), strict=True))
    columns = median_low(table.dim for table in workload.tables)
    speeds = measure_codecs([c for name, c in codecs.items() if name != FP32.name], columns)
    return [
        FP32 if name == FP32.name else CodecCosts(name, *speeds[codec])
        for name, codec in codecs.items()
    ]

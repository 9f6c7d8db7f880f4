"""An analysis as JSON: the file of bounds for `CodecConfig.from_file`, and all of it for
machines."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torchrec_bls.analysis.analysis import Analysis, TableAnalysis
from torchrec_bls.codecs import bounds_file


def as_bounds(analysis: Analysis) -> dict[str, Any]:
    """Returns the file that `torchrec_bls.codecs.bounds_file` reads.

    It has the bound and stages of each table. It also has the measurements, so that stages can be
    chosen again for another link.
    """
    stages = analysis.chosen
    tables: dict[str, Any] = {
        each.table.name: {
            "bound": each.bound,
            "stages": stages[each.table.name].value,
            **_found(each),
        }
        for each in analysis.tables
    }
    for left in analysis.left_alone:
        tables[left.table.name] = {"codec": "fp32", "reason": left.reason}
    return {
        "version": bounds_file.VERSION,
        "backward": "fp32",
        "link": analysis.link,
        "link_source": analysis.link_source,
        "ranks_per_core": analysis.ranks_per_core,
        "tables": tables,
    }


def as_json(analysis: Analysis) -> dict[str, Any]:
    """Returns all results, by name."""
    return {
        "link": analysis.link,
        "link_source": analysis.link_source,
        "ranks_per_core": analysis.ranks_per_core,
        "bounds": asdict(analysis.bounds),
        "batches": analysis.batches,
        "tables": [
            {
                **asdict(each.table),
                "bound": each.bound,
                "ranked": [stages.value for stages in each.ranked],
                "speed_up": {stages.value: times for stages, times in each.speed_up.items()},
                **_found(each),
            }
            for each in analysis.tables
        ],
        "left_alone": [
            {**asdict(left.table), "reason": left.reason} for left in analysis.left_alone
        ],
        "warnings": analysis.warnings,
    }


def _found(each: TableAnalysis) -> dict[str, Any]:
    return {
        "measured": {stages.value: asdict(numbers) for stages, numbers in each.measured.items()},
        "class": each.table_class.value,
        **asdict(each.patterns),
        "homo_index": each.patterns.homo_index,
    }

"""An analysis as one HTML page that loads nothing from elsewhere."""

from __future__ import annotations

from html import escape

from torchrec_bls.analysis.analysis import Analysis, TableAnalysis
from torchrec_bls.analysis.report.bars import bars
from torchrec_bls.codecs.compression import Compression

_STYLE = """
body { font: 14px sans-serif; margin: 2em; max-width: 85em }
table { border-collapse: collapse; margin: 1em 0 }
td, th { padding: 2px 8px; text-align: right; border-bottom: 1px solid #ddd; vertical-align: top }
td { font-variant-numeric: tabular-nums }
td:first-child, th:first-child, td.t, th.t { text-align: left }
.warning { color: #a04000 }
"""
# A heading, and whether the cells below it are text.
_COLUMNS = (
    ("table", True),
    ("rows", False),
    ("dim", False),
    ("distinct ids a batch", False),
    ("rows a batch", False),
    ("distinct rows", False),
    ("after rounding", False),
    ("eta", False),
    ("1 - eta", False),
    ("zero rows", False),
    ("bits a value", False),
    ("class", True),
    ("bound", False),
    ("stages", True),
    ("ratio", False),
    ("encode GB/s", False),
    ("decode GB/s", False),
    ("times as fast", False),
    ("runner-up", True),
    ("times as fast", False),
)


def as_html(analysis: Analysis) -> str:
    """Returns the page: warnings, a table, the speed-up of stages, eta and zero rows."""
    bounds = analysis.bounds
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Embedding tables</title>",
        f"<style>{_STYLE}</style><h1>Embedding tables</h1>",
        f"<p>{analysis.batches} batches. Link {analysis.link / 1e9:.3g} GB/s "
        f"({escape(analysis.link_source)}). Bounds {bounds.small:g} (small), {bounds.medium:g} "
        f"(medium) and {bounds.large:g} (large); eta at {bounds.probe:g}.</p>",
        *(f"<p class=warning>Warning: {escape(text)}.</p>" for text in analysis.warnings),
        _table(analysis),
    ]
    if analysis.tables:
        parts += _plots(analysis)
    return "\n".join(parts) + "\n</html>\n"


def _table(analysis: Analysis) -> str:
    head = "".join(f"<th{_kind(is_text)}>{name}</th>" for name, is_text in _COLUMNS)
    rows = "\n".join(
        "<tr>"
        + "".join(
            f"<td{_kind(is_text)}>{escape(cell)}</td>"
            for cell, (_, is_text) in zip(_cells(each), _COLUMNS, strict=True)
        )
        + "</tr>"
        for each in analysis.tables
    )
    return f"<table><tr>{head}</tr>\n{rows}</table>"


def _kind(is_text: bool) -> str:
    return " class=t" if is_text else ""


def _cells(each: TableAnalysis) -> list[str]:
    table, patterns = each.table, each.patterns
    best, runner_up = each.ranked[:2]
    numbers = each.measured[best]
    return [
        table.name,
        f"{table.rows:,}",
        str(table.dim),
        f"{patterns.distinct_ids:,.0f}",
        f"{patterns.rows:,.0f}",
        f"{patterns.distinct_rows:,.0f}",
        f"{patterns.rounded_rows:,.0f}",
        f"{patterns.eta:.3f}",
        f"{patterns.homo_index:.3f}",
        f"{patterns.zero_share:.0%}",
        f"{patterns.entropy_bits:.2f}",
        each.table_class.value,
        f"{each.bound:g}",
        best.value,
        f"{numbers.ratio:.1f}",
        f"{numbers.encode / 1e9:.2f}",
        f"{numbers.decode / 1e9:.2f}",
        f"{each.speed_up[best]:.2f}",
        runner_up.value,
        f"{each.speed_up[runner_up]:.2f}",
    ]


def _plots(analysis: Analysis) -> list[str]:
    tables = analysis.tables
    names = [each.table.name for each in tables]
    return [
        "<h2>What stages bring</h2><p>How many times as fast as float32 over the same link, by "
        "equation 2.</p>",
        bars(
            names,
            {
                stages.value: [each.speed_up.get(stages) for each in tables]
                for stages in Compression
            },
            "{:.2f}",
        ),
        "<h2>Ratio</h2><p>Bytes of float32 to bytes that travel.</p>",
        bars(
            names,
            {
                stages.value: [
                    each.measured[stages].ratio if stages in each.measured else None
                    for each in tables
                ]
                for stages in Compression
            },
            "{:.1f}",
        ),
        "<h2>Rounding</h2><p>The share of distinct rows that rounding makes equal to others, and "
        "of rows that it makes zero.</p>",
        bars(
            names,
            {
                "eta": [each.patterns.eta for each in tables],
                "zero rows": [each.patterns.zero_share for each in tables],
            },
            "{:.3f}",
        ),
    ]

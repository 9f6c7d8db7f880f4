"""An analysis for people, as text and as a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchrec_bls.analysis.analysis import Analysis, TableAnalysis
from torchrec_bls.codecs.compression import Compression
from torchrec_bls.rendering import document
from torchrec_bls.rendering.document import Bar, Bars, Caution, Heading, Part, Table, Words

_NAME = 14
_COLUMNS = (
    *(Words("table", most=_NAME), "rows x dim", "ids", "rows", "differ"),
    *("eta", "1-eta", "zero", "bits", Words("class"), "bound"),
)


def as_text(analysis: Analysis) -> str:
    """Returns the report: a row of figures for each table with its stages below, and warnings."""
    return document.as_text(_parts(analysis))


def as_html(analysis: Analysis) -> str:
    """Returns the same as a page, which also has the speed-up and ratio of all stages."""
    parts = _parts(analysis)
    if analysis.tables:
        parts += [
            Heading("What stages bring"),
            "How many times as fast as float32 over the same link, by equation 2.",
            _by_stages(analysis, "{:.2f}", lambda each, stages: each.speed_up.get(stages)),
            Heading("Ratio"),
            "Bytes of float32 to bytes that travel.",
            _by_stages(analysis, "{:.1f}", _ratio),
        ]
    return document.as_html("Embedding tables", parts)


def _parts(analysis: Analysis) -> list[Part]:
    bounds = analysis.bounds
    return [
        f"{analysis.batches} batches; link {analysis.link / 1e9:.3g} GB/s "
        f"({analysis.link_source}); bounds {bounds.small:g} small, {bounds.medium:g} medium, "
        f"{bounds.large:g} large; eta at {bounds.probe:g}",
        Table(
            _COLUMNS,
            [_figures(each) for each in analysis.tables],
            [_stages(each) for each in analysis.tables],
        ),
        "Means over batches: distinct ids, rows, distinct rows, and eta, the share of these that "
        "rounding makes equal to others. At the table's bound: rows that are zero, and bits a "
        "value.",
        *(Caution(f"Warning: {warning}.") for warning in analysis.warnings),
    ]


def _figures(each: TableAnalysis) -> Sequence[str]:
    table, patterns = each.table, each.patterns
    return (
        table.name,
        f"{table.rows:,} x {table.dim}",
        f"{patterns.distinct_ids:,.0f}",
        f"{patterns.rows:,.0f}",
        f"{patterns.distinct_rows:,.0f}",
        f"{patterns.eta:.3f}",
        f"{patterns.homo_index:.3f}",
        f"{patterns.zero_share:.0%}",
        f"{patterns.entropy_bits:.2f}",
        each.table_class.value,
        f"{each.bound:g}",
    )


def _stages(each: TableAnalysis) -> str:
    best, runner_up = each.ranked[:2]
    numbers = each.measured[best]
    return (
        f"{best.value}: {each.speed_up[best]:.2f} times as fast (ratio {numbers.ratio:.1f}, "
        f"{numbers.encode / 1e9:.2f} GB/s encoded, {numbers.decode / 1e9:.2f} decoded); runner-up "
        f"{runner_up.value}, {each.speed_up[runner_up]:.2f}"
    )


def _ratio(each: TableAnalysis, stages: Compression) -> float | None:
    return each.measured[stages].ratio if stages in each.measured else None


def _by_stages(
    analysis: Analysis,
    form: str,
    value_of: Callable[[TableAnalysis, Compression], float | None],
) -> Table:
    """Returns a table of a value for each table and stages; None leaves a cell empty."""
    rows = []
    for each in analysis.tables:
        values = [value_of(each, stages) for stages in Compression]
        bars = ("" if v is None else Bar([v], label=form.format(v)) for v in values)
        rows.append([each.table.name, *bars])
    return Table([Words("table"), *(Bars([stages.value]) for stages in Compression)], rows)

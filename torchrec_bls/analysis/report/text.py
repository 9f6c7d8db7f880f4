"""An analysis as text of at most 100 columns."""

import textwrap

from torchrec_bls.analysis.analysis import Analysis, TableAnalysis

WIDTH = 100
_NAME = 16


def as_text(analysis: Analysis) -> str:
    """Returns the report: a row of figures for each table with its stages below, and warnings."""
    bounds = analysis.bounds
    introduction = (
        f"{analysis.batches} batches; link {analysis.link / 1e9:.3g} GB/s "
        f"({analysis.link_source}); bounds {bounds.small:g} small, {bounds.medium:g} medium, "
        f"{bounds.large:g} large; eta at {bounds.probe:g}"
    )
    lines = [
        *textwrap.wrap(introduction, WIDTH),
        "",
        f"{'table':<{_NAME}} {'rows x dim':>15} {'ids':>7} {'rows':>7} {'differ':>7} "
        f"{'eta':>6} {'1-eta':>6} {'zero':>5} {'bits':>5}  class    bound",
    ]
    for each in analysis.tables:
        lines += [_figures(each), *_stages(each)]
    for warning in analysis.warnings:
        lines += ["", *textwrap.wrap(f"Warning: {warning}.", WIDTH, subsequent_indent="  ")]
    return "\n".join(lines)


def _figures(each: TableAnalysis) -> str:
    table, patterns = each.table, each.patterns
    name = table.name if len(table.name) <= _NAME else table.name[: _NAME - 3] + "..."
    size = f"{table.rows:,} x {table.dim}"
    return (
        f"{name:<{_NAME}} {size:>15} {patterns.distinct_ids:>7,.0f} {patterns.rows:>7,.0f} "
        f"{patterns.distinct_rows:>7,.0f} {patterns.eta:>6.3f} {patterns.homo_index:>6.3f} "
        f"{patterns.zero_share:>5.0%} {patterns.entropy_bits:>5.2f}  {each.table_class.value:<8} "
        f"{each.bound:g}"
    )


def _stages(each: TableAnalysis) -> list[str]:
    best, runner_up = each.ranked[:2]
    numbers = each.measured[best]
    line = (
        f"{best.value}: {each.speed_up[best]:.2f} times as fast (ratio {numbers.ratio:.1f}, "
        f"{numbers.encode / 1e9:.2f} GB/s encoded, {numbers.decode / 1e9:.2f} decoded); runner-up "
        f"{runner_up.value}, {each.speed_up[runner_up]:.2f}"
    )
    indent = " " * 4
    return textwrap.wrap(
        line, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )

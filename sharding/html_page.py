"""HTML pages that load nothing from elsewhere."""

from collections.abc import Sequence

_STYLE = """
body { font: 14px sans-serif; margin: 2em; max-width: 75em }
table { border-collapse: collapse; margin: 1em 0 }
td, th { padding: 2px 10px; text-align: left; border-bottom: 1px solid #ddd; vertical-align: top }
"""


def page(title: str, parts: Sequence[str], style: str = "") -> str:
    """Returns a page with a heading.

    Args:
        title: title of the page, HTML like the other arguments.
        parts: content below the title.
        style: further CSS.
    """
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
    start = f"{head}\n<style>{_STYLE}{style}</style><h1>{title}</h1>"
    return "\n".join([start, *parts]) + "\n</html>\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table of cells that are HTML."""
    cells = "".join(f"<th>{cell}</th>" for cell in head)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>\n{body}</table>"

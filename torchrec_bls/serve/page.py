"""A page that shows how a service does. It loads nothing from elsewhere, and renews itself."""

from html import escape
from pathlib import Path
from string import Template
from urllib.parse import quote

import numpy as np

from torchrec_bls.direct.serving.serving_state import ServingState
from torchrec_bls.rendering.document import STYLE
from torchrec_bls.serve.outcomes import Outcome
from torchrec_bls.serve.status import LOSSES, Status
from torchrec_bls.serve.tally import Tally

_TEMPLATE = Template(Path(__file__).with_suffix(".html").read_text())
_NOTHING = "-"
_MEANINGS = {
    Outcome.OK: "answered by the deadline",
    Outcome.LATE: "answered after the deadline: the contract is violated",
    Outcome.REFUSED: "would have been late, by prediction at the arrival",
    Outcome.EXPIRED: "admitted, but hopeless before its batch began",
    Outcome.DRAINED: "came while no version served",
    Outcome.BAD: "does not fit the model",
    Outcome.TOO_LARGE: "more samples or bytes than a request may have",
    Outcome.UNKNOWN: "for a model or version that is not served",
    Outcome.WRONG_METHOD: "no POST",
    Outcome.FAILED: "the model raised, or returned no numbers",
    Outcome.GONE: "its caller left first",
}
# Outcomes that are shown even if no request has ended so.
_ALWAYS = (Outcome.OK, Outcome.LATE, Outcome.REFUSED, Outcome.EXPIRED)
# Of what the service is to blame for; the others are mistakes of callers.
_FAULTS = (Outcome.LATE, Outcome.EXPIRED, Outcome.FAILED)


def page(
    name: str,
    state: ServingState,
    tally: Tally,
    status: Status,
    why_not_ready: str,
    deadline_ms: float,
    up_s: float,
    freshness: float | None,
) -> str:
    """Returns the page, HTML.

    Args:
        name: name of the model.
        state: what the process serves.
        tally: requests that have ended.
        status: what the supervisor says.
        why_not_ready: why a proxy should send no requests here; empty if it should.
        deadline_ms: milliseconds that a request has if it says nothing else.
        up_s: seconds since the process began to serve.
        freshness: seconds from the training to the answers of the slowest worker, of the version
            that it changed to last; None: they are unknown.
    """
    latencies = [each.seconds for each in tally.last if each.outcome in (Outcome.OK, Outcome.LATE)]
    rate = tally.rate()
    facts = {
        "name": name,
        "path": quote(name, safe=""),
        "version": _version(state),
        "age": _duration(state.age),
        "up": _duration(up_s),
        "rate": f"{rate:,.{0 if rate >= 10 else 1}f}",
        "answered": f"{len(latencies):,}",
        "deadline": f"{deadline_ms:g} ms",
        "last": f"{len(tally.last):,}",
        "publish_seconds": _duration(state.publish_seconds),
        "written": _bytes(state.bytes_written),
        "reused": _bytes(state.bytes_reused),
        "workers": f"{status.ready} of {status.workers}",
        "lost": f"{sum(status.starts.get(cause, 0) for cause in LOSSES):,}",
        "freshness": _duration(freshness),
        "failed": f"{status.refreshes.failed:,}",
        **_quantiles(latencies),
    }
    return _TEMPLATE.substitute(
        {key: escape(value) for key, value in facts.items()},
        style=STYLE,
        readiness=_readiness(why_not_ready),
        problems="".join(
            f'<p class="problem">{escape(each)}</p>' for each in _problems(state, status)
        ),
        outcomes="\n".join(_outcomes(tally)),
    )


def _version(state: ServingState) -> str:
    if state.announced_serial > state.serial:
        return f"{state.version} ({state.announced} from the next batch on)"
    return state.version


def _readiness(why_not: str) -> str:
    if why_not:
        return f'<strong class="bad">not ready: {escape(why_not)}</strong>'
    return '<strong class="good">ready</strong>'


def _problems(state: ServingState, status: Status) -> list[str]:
    problems = []
    if status.ready < status.workers:
        problems.append(f"{status.ready} of {status.workers} workers answer: the log says why.")
    if status.refreshes.problem:
        problems.append(f"The newest checkpoint is not served: {status.refreshes.problem}")
    if state.problem:
        problems.append(f"This process does not follow new versions: {state.problem}")
    if state.owners_gone:
        problems.append(
            "The process that keeps the tables has ended. Requests are answered; there are no "
            "refreshes until another one has taken over."
        )
    if state.small_page_bytes:
        problems.append(
            f"{_bytes(state.small_page_bytes)} of the tables have small pages, since the kernel "
            "had no large ones: torchrec-bls doctor says why."
        )
    return problems


def _quantiles(seconds: list[float]) -> dict[str, str]:
    names = ("p50", "p99", "p999", "longest")
    if not seconds:
        return dict.fromkeys(names, _NOTHING)
    found = np.quantile(seconds, [0.5, 0.99, 0.999, 1.0], method="inverted_cdf")
    return {name: f"{each * 1e3:.2f} ms" for name, each in zip(names, found, strict=True)}


def _outcomes(tally: Tally) -> list[str]:
    """Returns a row of the table for each outcome."""
    last = dict.fromkeys(Outcome, 0)
    for each in tally.last:
        last[each.outcome] += 1
    rows = []
    for outcome in Outcome:
        if outcome in _ALWAYS or tally.counts[outcome]:
            kind = ' class="bad"' if outcome in _FAULTS and last[outcome] else ""
            name = outcome.label.replace("_", " ")
            numbers = f"<td>{last[outcome]:,}</td><td>{tally.counts[outcome]:,}</td>"
            meaning = _MEANINGS[outcome]
            rows.append(f"<tr{kind}><td>{name}</td>{numbers}<td>{meaning}</td></tr>")
    return rows


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return _NOTHING
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for unit, size, smaller, part in (
        ("d", 86400, "h", 3600),
        ("h", 3600, "min", 60),
        ("min", 60, "s", 1),
    ):
        if whole >= size:
            return f"{whole // size:,} {unit} {whole % size // part} {smaller}"
    return f"{whole} s"


def _bytes(count: int | None) -> str:
    if count is None:
        return _NOTHING
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"

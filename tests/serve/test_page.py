"""The page shows what is so, and nothing of it is taken for HTML."""

import re
import time
from html.parser import HTMLParser
from typing import Any

import pytest

from tests.serve.states import made_up_state, made_up_status
from torchrec_bls.serve.outcomes import Outcome
from torchrec_bls.serve.page import page
from torchrec_bls.serve.status import Refreshes, Status
from torchrec_bls.serve.tally import Ended, Tally

Attributes = list[tuple[str, str | None]]


class Parsed(HTMLParser):
    """The tags of a page, and what a reader sees."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._within = ""
        self.feed(text)
        self.text = " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: Attributes) -> None:
        self.tags.append((tag, dict(attrs)))
        self._within = tag

    def handle_data(self, data: str) -> None:
        if self._within not in ("style", "script", "title"):
            self.texts.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._within = ""


def tally_of(*outcomes: Outcome, ms: float = 4.0) -> Tally:
    tally = Tally()
    for outcome in outcomes:
        tally.add(Ended(time.monotonic(), outcome, ms / 1e3))
    return tally


def parsed(
    name: str = "ranker",
    tally: Tally | None = None,
    status: Status | None = None,
    why_not_ready: str = "",
    up_s: float = 90.0,
    freshness: float | None = 1.4,
    **state: Any,
) -> Parsed:
    counts, told = tally or tally_of(), status or made_up_status()
    shown = made_up_state(**state)
    return Parsed(page(name, shown, counts, told, why_not_ready, 20.0, up_s, freshness))


def test_it_shows_version_age_and_the_last_refresh() -> None:
    text = parsed(status=made_up_status(Refreshes(failed=2))).text
    assert "ranker ready" in text
    assert "Version step-7@0a1b2c3d Age of the version 4 min 12 s Up 1 min 30 s" in text
    assert "From training to answers 1.4 s Took 1.2 s Written 3.0 MiB Reused 5.0 GiB" in text
    assert "Failed refreshes 2" in text
    assert "deadline is 20 ms" in text


def test_it_shows_how_many_workers_answer_and_were_lost() -> None:
    text = parsed(status=made_up_status(death=3, stall=1, renewal=2)).text
    assert "Workers that answer 2 of 2 Workers lost 4" in text


def test_an_idle_service_says_which_version_comes_next() -> None:
    text = parsed(announced="step-8@4e5f6071", announced_serial=4).text
    assert "Version step-7@0a1b2c3d (step-8@4e5f6071 from the next batch on) Age" in text


def test_a_service_without_requests_and_publications_has_a_page() -> None:
    text = parsed(age=None, publish_seconds=None, bytes_written=None, bytes_reused=None).text
    assert "Median - p99 - p99.9 - Longest -" in text
    assert "Took - Written - Reused -" in text


def test_requests_are_counted_by_outcome() -> None:
    outcomes = [Outcome.OK] * 5 + [Outcome.REFUSED] * 3 + [Outcome.TOO_LARGE]
    text = parsed(tally=tally_of(*outcomes)).text
    for row in ("ok 5 5", "late 0 0", "refused 3 3", "expired 0 0", "too large 1 1"):
        assert row in text
    assert "wrong method" not in text  # nobody needs to read of what never happened


def test_counts_since_the_start_outlive_the_last_requests() -> None:
    tally = tally_of(*[Outcome.REFUSED] * 10, *[Outcome.OK] * 3000)
    text = parsed(tally=tally).text
    assert "ok 2,048 3,000" in text
    assert "refused 0 10" in text


def test_latencies_are_quantiles_of_answers() -> None:
    tally = Tally()
    for ms in range(1000, 0, -1):
        outcome = Outcome.OK if ms < 900 else Outcome.LATE
        tally.add(Ended(time.monotonic(), outcome, ms / 1e3))
        tally.add(Ended(time.monotonic(), Outcome.REFUSED, 5.0))
    latencies = sorted(each.seconds for each in tally.last if each.outcome != Outcome.REFUSED)
    text = parsed(tally=tally).text
    for label, rank in (("Median", 500), ("p99", 990), ("p99.9", 999), ("Longest", 1000)):
        assert f"{label} {latencies[rank - 1] * 1e3:.2f} ms" in text
    assert "of the last answers (1,000)" in text


@pytest.mark.parametrize(
    "facts, text",
    [
        ({"why_not_ready": "version 'b' is being made"}, "not ready: version 'b' is being made"),
        (
            {"status": made_up_status(Refreshes(1, "NaN in table t"))},
            "is not served: NaN in table t",
        ),
        ({"status": made_up_status(ready=1)}, "1 of 2 workers answer"),
        ({"problem": "shapes differ"}, "does not follow new versions: shapes differ"),
        ({"owners_gone": (0,)}, "The process that keeps the tables has ended"),
        ({"small_page_bytes": 2 << 20}, "2.0 MiB of the tables have small pages"),
    ],
)
def test_problems_are_said(facts: dict[str, Any], text: str) -> None:
    assert text in parsed(**facts).text
    assert text not in parsed().text


def test_nothing_is_taken_for_html() -> None:
    evil = "</p><script>alert('$name')</script><img src=x onerror=\"alert(1)\">"
    usual = [tag for tag, _ in parsed(status=made_up_status(Refreshes(1, "a")), problem="b").tags]
    shown = parsed(
        name=evil,
        status=made_up_status(Refreshes(1, evil)),
        why_not_ready=evil,
        version=evil,
        problem=evil,
    )
    assert [tag for tag, _ in shown.tags] == usual
    assert shown.text.count(evil) == 5
    links = [attributes.get("href") for tag, attributes in shown.tags if tag == "a"]
    assert all(link and re.fullmatch(r"[\w/.%-]+", link) for link in links)


def test_it_loads_nothing_from_elsewhere() -> None:
    for tag, attributes in parsed().tags:
        assert "src" not in attributes, tag
        assert not re.match(r"(\w+:)?//", attributes.get("href") or ""), tag
    text = page("ranker", made_up_state(), tally_of(), made_up_status(), "", 20.0, 1.0, None)
    assert "http://" not in text and "https://" not in text and "url(" not in text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.0, "0 ms"),
        (1.25, "1.2 s"),
        (59.9, "59 s"),
        (60.0, "1 min 0 s"),
        (3599.0, "59 min 59 s"),
        (7260.0, "2 h 1 min"),
        (90000.0, "1 d 1 h"),
    ],
)
def test_durations_are_read_at_a_glance(seconds: float, text: str) -> None:
    assert f"Up {text} Requests" in parsed(up_s=seconds).text

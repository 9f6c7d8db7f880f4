"""The calls of `openapi_cases`, by an interpreter that has schemathesis and no torch."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy
from schemathesis import GenerationMode

# Refusals by the deadline, which a case may choose.
_REFUSALS = (503, 504)


def main() -> int:
    said = json.load(sys.stdin)
    schema = schemathesis.openapi.from_url(f"{said['url']}/openapi.json")
    infer = [path for path in schema if path.endswith("/infer")]
    # What takes a body is asked most.
    strategies = [
        strategy.as_strategy(generation_mode=mode)
        for mode in GenerationMode
        for strategy in (schema, *(schema[path]["POST"] for path in infer for _ in range(3)))
    ]
    statuses: Counter[tuple[str, int]] = Counter()
    problems: list[str] = []
    with requests.Session() as session:

        @seed(said["seed"])
        @settings(
            max_examples=said["cases"],
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=_any_of(strategies))
        def ask(case: schemathesis.Case) -> None:
            try:
                status = case.call(base_url=said["url"], session=session, timeout=60).status_code
            except requests.exceptions.InvalidHeader:
                status = 0  # the client does not send it
            except requests.RequestException as error:
                status = -1
                problems.append(f"{case.as_curl_command()}: {error}")
            statuses[case.method, status] += 1
            if status >= 500 and status not in _REFUSALS:
                problems.append(f"{status}: {case.as_curl_command()}")

        ask()
    for (method, status), count in sorted(statuses.items()):
        print(f"{method:8} {status:4}  {count}")
    print(f"{sum(statuses.values())} cases, {len(problems)} that must not be")
    for each in problems[:10]:
        print(each[:2000])
    return 1 if problems else 0


def _any_of(strategies: Sequence[SearchStrategy[Any]]) -> SearchStrategy[Any]:
    first, *others = strategies
    for each in others:
        first = first | each
    return first


if __name__ == "__main__":
    sys.exit(main())

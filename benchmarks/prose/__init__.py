"""What pages say in sentences of their own of the records: each figure as the record has it.

`results_pages` writes tables. The sentences around them are written by hand, and stand here with
their figures left to the records. A test looks for each in its page: a sentence that is not there
has to be written anew, in the page, or here if the page says something else now.
"""

from collections.abc import Callable

from benchmarks.prose import bounded_lag, papers, planner, results
from benchmarks.prose.figures import Records, Sentences

#: By page, what makes its sentences.
PAGES: dict[str, Callable[[Records], Sentences]] = {
    "README.md": results.readme,
    "docs/results/delays.md": results.delays,
    "docs/results/exchange.md": results.exchange,
    "docs/results/backend.md": results.backend,
    "docs/results/overlap.md": results.overlap,
    "docs/results/direct-reads.md": results.direct_reads,
    "docs/results/serving.md": results.serving,
    "docs/reproduction/bls.md": bounded_lag.bls,
    "docs/reproduction/bounded.md": papers.bounded,
    "docs/reproduction/libra.md": papers.libra,
    "docs/reproduction/performance-models.md": planner.performance_models,
    "docs/reproduction/quantized.md": papers.quantized,
    "docs/reproduction/simulated-steps.md": planner.simulated_steps,
}


def missing(page: str, text: str, records: Records) -> list[str]:
    """Sentences that a page should have, and does not."""
    flat = " ".join(text.split())
    return [each for each in PAGES[page](records) if each not in flat]

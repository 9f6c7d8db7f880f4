"""BentoML: `bentoml serve` imports this."""

import bentoml

from benchmarks.serve.peers.scorer import Scorer, hush
from benchmarks.serve.peers.serving import told

_SERVING = told()


@bentoml.service(
    workers=1,
    metrics={"enabled": False},
    logging={"access": {"enabled": False}},
)
class Scores:
    """Refuses what it predicts to take longer than the deadline."""

    def __init__(self) -> None:
        hush()
        self._scorer = Scorer(_SERVING)

    @bentoml.api(
        batchable=True,
        max_batch_size=_SERVING.batching.requests,
        max_latency_ms=_SERVING.deadline_ms,
        route="/score",
    )
    async def score(self, bodies: list[bytes]) -> list[bytes]:
        """Answers in the loop's thread: on one core another one would only take turns with it."""
        return self._scorer(bodies)

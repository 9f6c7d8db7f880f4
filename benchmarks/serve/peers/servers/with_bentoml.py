"""BentoML: `bentoml serve` imports this."""

from typing import Any

import bentoml
from starlette.requests import Request
from starlette.responses import Response

from benchmarks.serve.peers.scorer import Scorer, hush
from benchmarks.serve.peers.serving import told

_SERVING = told()


class Bodies(bentoml.IODescriptor):
    """Requests as bytes: of BentoML's own encodings, those for arrays are JSON and forms."""

    bodies: list[bytes]

    @classmethod
    async def from_http_request(cls, request: Request, serde: Any) -> "Bodies":
        return cls.model_construct(bodies=[await request.body()])


class Answers(bentoml.IODescriptor):
    """Answers as bytes."""

    bodies: list[bytes]

    @classmethod
    async def to_http_response(cls, obj: list[bytes], serde: Any) -> Response:
        (body,) = obj
        return Response(body)


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
        input_spec=Bodies,
        output_spec=Answers,
        batchable=True,
        max_batch_size=_SERVING.batching.requests,
        max_latency_ms=_SERVING.deadline_ms,
        route="/score",
    )
    def score(self, bodies: list[bytes]) -> list[bytes]:
        """Answers in a thread: BentoML knows how long a request has waited only once it read it."""
        return self._scorer(bodies)

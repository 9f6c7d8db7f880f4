"""FastAPI, and the few lines of batching that its users write: it has none."""

import asyncio

import uvicorn
from fastapi import FastAPI, Request, Response

from benchmarks.serve.peers.scorer import Scorer, hush
from benchmarks.serve.peers.serving import Batching, told


class Batcher:
    """Collects requests until a batch is full, or the first has waited. All in the loop's thread:
    on one core another one would only take turns with it."""

    def __init__(self, scorer: Scorer, batching: Batching) -> None:
        self._scorer, self._requests = scorer, batching.requests
        self._wait_s = (batching.wait_ms or 0) / 1000
        self._waiting: list[tuple[bytes, asyncio.Future[bytes]]] = []
        self._timer: asyncio.Handle | None = None

    async def answer(self, body: bytes) -> bytes:
        """The body of the answer."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[bytes] = loop.create_future()
        self._waiting.append((body, future))
        if len(self._waiting) >= self._requests:
            self._run()
        elif self._timer is None:
            self._timer = loop.call_later(self._wait_s, self._run)
        return await future

    def _run(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting = self._waiting, []
        for (_, future), scores in zip(batch, self._scorer([b for b, _ in batch]), strict=True):
            if not future.done():  # the caller has gone
                future.set_result(scores)


def main() -> None:
    serving = told()
    hush()
    batcher = Batcher(Scorer(serving), serving.batching)
    app = FastAPI()

    @app.post("/score")
    async def score(request: Request) -> Response:
        return Response(await batcher.answer(await request.body()))

    uvicorn.run(
        app,
        host="127.0.0.1",
        port=serving.port,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_config=None,
    )


if __name__ == "__main__":
    main()

"""LitServe: a process that reads requests, one that runs the model, and one with their queue."""

from typing import Annotated

import litserve
from fastapi import Depends, Request, Response

from benchmarks.serve.peers.scorer import Scorer, hush
from benchmarks.serve.peers.serving import Serving, told


async def _body(request: Request) -> bytes:
    return await request.body()


class ScoreApi(litserve.LitAPI):
    """Takes requests as bytes: LitServe itself knows JSON and forms alone."""

    def __init__(self, serving: Serving) -> None:
        batching = serving.batching
        super().__init__(
            max_batch_size=batching.requests,
            batch_timeout=(batching.wait_ms or 0) / 1000,
            api_path="/score",
        )
        self._serving = serving

    def setup(self, device: str) -> None:
        hush()
        self._scorer = Scorer(self._serving)

    def decode_request(self, request: Annotated[bytes, Depends(_body)]) -> bytes:
        return request

    def batch(self, inputs: list[bytes]) -> list[bytes]:
        return inputs

    def predict(self, x: bytes | list[bytes]) -> bytes | list[bytes]:
        return self._scorer(x) if isinstance(x, list) else self._scorer([x])[0]

    def unbatch(self, output: list[bytes]) -> list[bytes]:
        return output

    def encode_response(self, output: bytes) -> Response:
        return Response(output)


def main() -> None:
    serving = told()
    hush()
    server = litserve.LitServer(
        ScoreApi(serving), accelerator="cpu", timeout=serving.deadline_ms / 1000
    )
    server.run(
        host="127.0.0.1",
        port=serving.port,
        num_api_servers=1,
        log_level="critical",
        generate_client_file=False,
        access_log=False,
        loop="uvloop",
        http="httptools",
    )


if __name__ == "__main__":
    main()

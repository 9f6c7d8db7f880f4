"""MLServer: a process that reads requests, and worker processes that run the model."""

import asyncio
from typing import Annotated

from fastapi import Depends, Request, Response
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.handlers import custom_handler
from mlserver.utils import install_uvloop_event_loop

from benchmarks.serve.peers.scorer import Scorer, hush
from benchmarks.serve.peers.serving import Serving, told
from benchmarks.serve.service import free_port


async def _body(request: Request) -> bytes:
    return await request.body()


class Scores(MLModel):
    """Takes requests as bytes: MLServer itself reads tensors from JSON alone, over HTTP."""

    async def load(self) -> bool:
        """Loads the model in a worker; the process that reads requests calls this never."""
        hush()
        self._scorer = Scorer(told())
        return True

    @custom_handler(rest_path="/score")
    async def score(self, body: Annotated[bytes, Depends(_body)]) -> Response:
        """Answers in a worker. MLServer makes batches of its own kind of requests only."""
        return Response(self._scorer([body])[0])


async def _serve(serving: Serving) -> None:
    settings = Settings(
        debug=False,
        parallel_workers=serving.workers,
        host="127.0.0.1",
        http_port=serving.port,
        grpc_port=free_port(),
        metrics_endpoint=None,
        gzip_enabled=False,
        environments_dir=serving.folder,
        metrics_dir=serving.folder,
    )
    model = ModelSettings(name="dlrm", implementation=f"{Scores.__module__}.Scores")
    await MLServer(settings).start([model])


def main() -> None:
    hush()
    install_uvloop_event_loop()
    asyncio.run(_serve(told()))


if __name__ == "__main__":
    # The workers import the model by its name.
    from benchmarks.serve.peers.servers import with_mlserver

    with_mlserver.main()

"""Ray Serve: a proxy, a controller, and the replicas as actors of a Ray cluster of this host alone.

Whether its own proxy or HAProxy takes the requests is told by Ray's variables.
"""

import ray
from ray import serve
from ray.serve.config import HTTPOptions
from ray.serve.schema import LoggingConfig
from starlette.requests import Request
from starlette.responses import Response

from benchmarks.serve.peers.scorer import Scorer, hush
from benchmarks.serve.peers.serving import told

_SERVING = told()
_LOGS = LoggingConfig(log_level="CRITICAL", enable_access_log=False)
# What a replica holds at once: requests that wait for a batch, too.
_ONGOING = 64
# Three checks in a row have to fail (REPLICA_HEALTH_CHECK_UNHEALTHY_THRESHOLD). The defaults are
# 10 and 30 s.
_CHECK_PERIOD_S, _CHECK_TIMEOUT_S = 0.5, 0.5
# A replica that is replaced has died or stands still: it has nothing to end. The default is 20 s.
_GRACE_S = 0.1


@serve.deployment(
    num_replicas=_SERVING.workers,
    max_ongoing_requests=_ONGOING,
    health_check_period_s=_CHECK_PERIOD_S,
    health_check_timeout_s=_CHECK_TIMEOUT_S,
    graceful_shutdown_wait_loop_s=_GRACE_S,
    graceful_shutdown_timeout_s=_GRACE_S,
    ray_actor_options={"num_cpus": 0},
    logging_config=_LOGS,
)
class Scores:
    """A replica."""

    def __init__(self) -> None:
        hush()
        self._scorer = Scorer(_SERVING)

    @serve.batch(
        max_batch_size=_SERVING.batching.requests,
        batch_wait_timeout_s=(_SERVING.batching.wait_ms or 0) / 1000,
    )
    async def _scores(self, bodies: list[bytes]) -> list[bytes]:
        return self._scorer(bodies)

    async def __call__(self, request: Request) -> Response:
        return Response(await self._scores(await request.body()))


def main() -> None:
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=128 << 20,
        _temp_dir=_SERVING.folder,
    )
    serve.start(
        http_options=HTTPOptions(host="127.0.0.1", port=_SERVING.port), logging_config=_LOGS
    )
    serve.run(Scores.bind(), route_prefix="/score", blocking=True)


if __name__ == "__main__":
    main()

"""Mosec: a front in Rust, and a worker process."""

from mosec import Server, Worker

from benchmarks.serve.peers.scorer import Scorer, hush
from benchmarks.serve.peers.serving import told


class Scores(Worker):
    """Takes requests as bytes."""

    resp_mime_type = "application/octet-stream"

    def __init__(self) -> None:
        super().__init__()
        hush()
        self._scorer = Scorer(told())

    def deserialize(self, data: bytes) -> bytes:
        return bytes(data)

    def serialize(self, data: bytes) -> bytes:
        return data

    def forward(self, data: bytes | list[bytes]) -> bytes | list[bytes]:
        return self._scorer(data) if isinstance(data, list) else self._scorer([data])[0]


def main() -> None:
    batching = told().batching
    server = Server()
    server.append_worker(
        Scores, max_batch_size=batching.requests, max_wait_time=int(batching.wait_ms or 0)
    )
    server.run()


if __name__ == "__main__":
    main()

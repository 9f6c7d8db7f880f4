"""Requests and scores of the peers as bytes: the samples' number, then the arrays as they are."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.serve import shape
from benchmarks.serve.encoding import post
from benchmarks.serve.traffic import Request


def encode(request: Request, path: str) -> bytes:
    """A POST: int32 B, then dense, lengths and values, little-endian."""
    samples = np.array(len(request.dense), dtype="<i4")
    arrays = (samples, request.dense, request.lengths, request.values)
    return post(path, b"".join(array.tobytes() for array in arrays))


def joined(bodies: Sequence[bytes]) -> Request:
    """One request of the samples of several, for a batch.

    Each key and sample has one id, as `traffic.requests` draws them: then ids of a request are a
    rectangle, and one copy joins a batch.

    Raises:
        ValueError: a body is too short, or has another number of ids.
    """
    denses, lengths, values = [], [], []
    for body in bodies:
        samples = int(np.frombuffer(body, "<i4", count=1)[0])
        ids = shape.TABLES * samples
        at = 4
        for arrays, dtype, count, rows in (
            (denses, "<f4", shape.DENSE * samples, samples),
            (lengths, "<i4", ids, shape.TABLES),
            (values, "<i8", ids, shape.TABLES),
        ):
            array = np.frombuffer(body, dtype, count, at)
            arrays.append(array.reshape(rows, -1))
            at += array.nbytes
        if at != len(body):
            raise ValueError(f"{len(body)} bytes for {samples} samples, not {at}")
    return Request(
        np.concatenate(denses),
        np.concatenate(values, axis=1).reshape(-1),
        np.concatenate(lengths, axis=1).reshape(-1),
    )


def parted(scores: npt.NDArray[np.float32], bodies: Sequence[bytes]) -> list[bytes]:
    """The scores of a batch, as the body of the answer to each of its requests."""
    ends = np.cumsum([np.frombuffer(body, "<i4", count=1)[0] for body in bodies])
    return [part.tobytes() for part in np.split(scores, ends[:-1])]


def scores_of(response: bytes) -> npt.NDArray[np.float32]:
    """The scores in a whole response with status 200, [B]."""
    return np.frombuffer(response.partition(b"\r\n\r\n")[2], "<f4")

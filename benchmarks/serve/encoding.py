"""Requests as bytes of HTTP/1.1, in the Open Inference Protocol v2 with binary tensors."""

import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.serve.traffic import Request

_HEAD_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class Answer:
    """What a reply says.

    Attributes:
        version: name of the version of the weights that computed it.
        scores: [B] float32.
    """

    version: str
    scores: npt.NDArray[np.float32]


def encode(request: Request, path: str, timeout_s: float) -> bytes:
    """A POST of the request, whole.

    Args:
        request: what is asked.
        path: path of the URL, "/v2/models/MODEL/infer".
        timeout_s: when the answer is due, in seconds from its arrival at the server.
    """
    tensors = (
        ("dense", "FP32", request.dense),
        ("ids.values", "INT64", request.values),
        ("ids.lengths", "INT32", request.lengths),
    )
    said = {
        "parameters": {"timeout": round(timeout_s * 1e6)},
        "inputs": [
            {
                "name": name,
                "datatype": datatype,
                "shape": tensor.shape,
                "parameters": {"binary_data_size": tensor.nbytes},
            }
            for name, datatype, tensor in tensors
        ],
        "outputs": [{"name": "scores", "parameters": {"binary_data": True}}],
    }
    head = json.dumps(said, separators=(",", ":")).encode()
    body = b"".join([head, *(tensor.tobytes() for _, _, tensor in tensors)])
    return post(path, body, {_HEAD_LENGTH: str(len(head))})


def post(path: str, body: bytes, headers: dict[str, str] | None = None) -> bytes:
    """A POST of any body, for encodings of other servers too."""
    lines = {
        "Host": "127.0.0.1",
        "Content-Type": "application/octet-stream",
        "Content-Length": str(len(body)),
        **(headers or {}),
    }
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{text}\r\n".encode() + body


def decode(response: bytes) -> Answer:
    """The answer in a whole response with status 200 and a binary tensor "scores"."""
    lines, _, body = response.partition(b"\r\n\r\n")
    headers = dict(line.lower().split(b": ", 1) for line in lines.split(b"\r\n")[1:])
    length = int(headers[_HEAD_LENGTH.lower().encode()])
    said = json.loads(body[:length])
    (output,) = said["outputs"]
    if (output["name"], output["datatype"]) != ("scores", "FP32"):
        raise ValueError(f"the reply has {output}, not a tensor scores of FP32")
    scores = np.frombuffer(body[length:], dtype="<f4").reshape(output["shape"])
    return Answer(said["model_version"], scores)

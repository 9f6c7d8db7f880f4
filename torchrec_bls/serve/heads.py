"""Heads of requests: all that is known of one before its tensors are read.

Names and datatypes are those of the Open Inference Protocol v2, of which HTTP and gRPC are two
forms.
"""

from typing import NamedTuple

#: Tensors that a request may have: of each one something is done in Python.
MOST_TENSORS = 4096


class TensorHead(NamedTuple):
    """A tensor of a request.

    Attributes:
        name: its name.
        datatype: type of its elements: "FP32", "INT64", "INT32".
        shape: its shape.
        broadcast: whether its one sample stands for all samples of the request.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    broadcast: bool = False


class RequestHead(NamedTuple):
    """A request without the contents of its tensors.

    Attributes:
        timeout_us: microseconds that the caller gives it; None: the contract's.
        version: version that it asks for; empty: any.
        tensors: heads of its tensors.
    """

    timeout_us: int | None
    version: str
    tensors: tuple[TensorHead, ...]

"""A gRPC inference request in two parts: all but its raw tensors, and these as they lie."""

from typing import NoReturn

from torchrec_bls.serve.heads import MOST_TENSORS
from torchrec_bls.serve.outcomes import bad

# Number of `raw_input_contents` in ModelInferRequest, and protobuf's types of fields.
_RAW = 7
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT = 10
# Fields that a message may have: heads and contents of its tensors, outputs and parameters.
_MOST_FIELDS = 4 * MOST_TENSORS


def split(message: bytes) -> tuple[bytes, list[memoryview]]:
    """Returns a ModelInferRequest without its raw tensors, and these, which are not copied.

    Args:
        message: the request in protobuf's format.

    Raises:
        RequestError: it is not in that format.
    """
    view, at = memoryview(message), 0
    rest: list[memoryview] = []
    raw: list[memoryview] = []
    fields = 0
    while at < len(message):
        fields += 1
        if fields > _MOST_FIELDS:
            raise bad(f"the message has more than {_MOST_FIELDS} fields")
        begin = at
        tag, at = _varint(message, at)
        kind, field = tag & 7, tag >> 3
        if kind == _BYTES:
            size, at = _varint(message, at)
            content, at = at, at + size
            if field == _RAW and at <= len(message):
                raw.append(view[content:at])
                continue
        elif kind == _VARINT:
            _, at = _varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            _refuse()
        if at > len(message):
            _refuse()
        rest.append(view[begin:at])
    return b"".join(rest), raw


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for number, byte in enumerate(message[at : at + _LONGEST_VARINT]):
        value |= (byte & 0x7F) << (7 * number)
        if byte < 0x80:
            return value, at + number + 1
    return _refuse()


def _refuse() -> NoReturn:
    raise bad("the message is no ModelInferRequest")

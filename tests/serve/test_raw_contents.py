"""Raw tensors are found in a message without a copy, and all else is as protobuf has it."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as messages

from torchrec_bls.serve.outcomes import Outcome, RequestError
from torchrec_bls.serve.raw_contents import split


def request_of(raw: list[bytes]) -> messages.ModelInferRequest:
    made = messages.ModelInferRequest(model_name="m", model_version="7", id="i")
    made.parameters["timeout"].int64_param = -5
    for number in range(len(raw)):
        made.inputs.add(name=f"t{number}", datatype="INT64", shape=[2**40, -1])
    made.raw_input_contents.extend(raw)
    made.outputs.add(name="scores")
    return made


@given(st.lists(st.binary(max_size=300), max_size=4))
def test_both_parts_are_what_protobuf_reads(raw: list[bytes]) -> None:
    request = request_of(raw)
    rest, found = split(request.SerializeToString())
    assert [bytes(each) for each in found] == raw
    request.ClearField("raw_input_contents")
    assert messages.ModelInferRequest.FromString(rest) == request


def test_raw_tensors_are_not_copied() -> None:
    message = request_of([bytes(range(16))]).SerializeToString()
    _, [found] = split(message)
    assert found.obj is message
    # They lie at any byte.
    assert np.frombuffer(found, dtype="<i8")[0] == int.from_bytes(bytes(range(8)), "little")


def test_fields_that_are_not_known_are_kept() -> None:
    added = b"\x98\x06\x05" + b"\xa1\x06" + bytes(8) + b"\xad\x06" + bytes(4)  # 99, 100, 101
    message = request_of([b"ab"]).SerializeToString()
    rest, found = split(added + message + added)
    assert rest.startswith(added) and rest.endswith(added)
    assert [bytes(each) for each in found] == [b"ab"]


@given(st.integers(0, 10**6))
def test_a_message_that_ends_too_early(cut: int) -> None:
    """Either it is refused here, or what is left is a message."""
    message = request_of([b"12345678", b""]).SerializeToString()
    begin = message[: cut % len(message)]
    try:
        _, raw = split(begin)
    except RequestError as error:
        assert error.outcome is Outcome.BAD
    else:
        parsed = messages.ModelInferRequest.FromString(begin)
        assert list(parsed.raw_input_contents) == [bytes(each) for each in raw]


@pytest.mark.parametrize(
    "message",
    [
        b"\x3a",  # no size
        b"\x3a\x05abcd",  # a size beyond the end
        b"\x3a" + b"\xff" * 9 + b"\x01",  # a size of 64 bits
        b"\x3a" + b"\xff" * 20,  # a number without an end
        b"\x3b\x3c",  # a group
        b"\x3e",  # a type that protobuf does not have
        b"\xa1\x06abc",  # eight bytes that are three
        b"\xad\x06abc",
        b"\x98\x06\xff",
    ],
)
def test_no_message(message: bytes) -> None:
    with pytest.raises(RequestError, match="no ModelInferRequest"):
        split(message)


def test_a_message_of_a_million_fields() -> None:
    began = time.process_time()
    with pytest.raises(RequestError, match="more than 16384 fields"):
        split(b"\x3a\x00" * (8 << 20))
    assert time.process_time() - began < 5

"""Bodies of inference requests and replies over HTTP: JSON, with tensors in it or behind it.

Open Inference Protocol v2, with Triton's extension of binary tensors.
"""

from math import prod
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchrec_bls.serve.heads import MOST_TENSORS, RequestHead, TensorHead
from torchrec_bls.serve.inputs import DTYPES
from torchrec_bls.serve.outcomes import bad
from torchrec_bls.serve.waiting import Answer

_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


# Parameters that are not known are passed over, and so is all else that is not named here.
class _TensorParameters(msgspec.Struct, frozen=True):
    binary_data_size: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    broadcast: bool = False


class _Tensor(msgspec.Struct, frozen=True):
    name: str
    shape: list[_Int64]
    datatype: str
    parameters: _TensorParameters = _TensorParameters()
    data: msgspec.Raw = msgspec.Raw()


class _OutputParameters(msgspec.Struct, frozen=True):
    binary_data: bool | None = None


class _Output(msgspec.Struct, frozen=True):
    name: str
    parameters: _OutputParameters = _OutputParameters()


class _Parameters(msgspec.Struct, frozen=True):
    timeout: _Int64 | None = None
    binary_data_output: bool = False


class _Body(msgspec.Struct, frozen=True):
    inputs: Annotated[list[_Tensor], msgspec.Meta(max_length=MOST_TENSORS)]
    id: str = ""
    parameters: _Parameters = _Parameters()
    outputs: Annotated[list[_Output], msgspec.Meta(max_length=MOST_TENSORS)] = []


_DECODER = msgspec.json.Decoder(_Body)
# Of a tensor that is binary. KServe's client writes a list beside one without elements.
_NO_DATA = (b"", b"null", b"[]")
_INTEGERS, _NESTED_INTEGERS = (
    msgspec.json.Decoder(list[int]),
    msgspec.json.Decoder(list[list[int]]),
)
_FLOATS, _NESTED_FLOATS = (
    msgspec.json.Decoder(list[float]),
    msgspec.json.Decoder(list[list[float]]),
)
_encode = msgspec.json.Encoder().encode


class JsonHead:
    """The JSON of a request.

    Args:
        text: the JSON.
        version: version in the path, or empty.

    Attributes:
        head: what it says.
        asked: parameters of each output that it asks for, by name; empty: all outputs.
        binary_bytes: bytes of all tensors behind it.

    Raises:
        RequestError: it is no such JSON.
    """

    def __init__(self, text: bytes | memoryview, version: str) -> None:
        try:
            self._body = _DECODER.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise bad(f"the request is no inference request in JSON: {error}") from error
        body = self._body
        self.head = RequestHead(
            body.parameters.timeout,
            version,
            tuple(
                [
                    TensorHead(
                        each.name, each.datatype, tuple(each.shape), each.parameters.broadcast
                    )
                    for each in body.inputs
                ]
            ),
        )
        self.asked = {each.name: each.parameters for each in body.outputs}
        self.binary_bytes = 0
        for each in body.inputs:
            size = each.parameters.binary_data_size
            if size is None:
                continue
            if bytes(each.data) not in _NO_DATA:
                raise bad(f"tensor '{each.name}' has data, and a binary_data_size as well")
            self.binary_bytes += size

    def contents(self, binary: memoryview) -> list[NDArray[Any]]:
        """Returns the elements of each tensor. Their datatypes and shapes are those that a model
        takes.

        Args:
            binary: what is behind the JSON.

        Raises:
            RequestError: they do not fit the head.
        """
        if len(binary) != self.binary_bytes:
            raise bad(
                f"{len(binary)} bytes follow the JSON, but the tensors' binary_data_size is "
                f"{self.binary_bytes} in all"
            )
        arrays, at = [], 0
        for each in self._body.inputs:
            dtype, size = DTYPES[each.datatype], each.parameters.binary_data_size
            if size is None:
                array = _from_json(each, dtype)
            else:
                count = prod(each.shape)
                if size != count * dtype.itemsize:
                    raise bad(
                        f"tensor '{each.name}' has binary_data_size {size}, but its shape "
                        f"{each.shape} of {each.datatype} takes {count * dtype.itemsize}"
                    )
                array = np.frombuffer(binary[at : at + size], dtype=dtype)
                at += size
            arrays.append(array)
        return arrays

    def reply(self, answer: Answer, model: str) -> tuple[bytes, int | None]:
        """Returns the body of the answer, and the size of its JSON if tensors follow.

        Args:
            answer: the answer, with all outputs that are asked for.
            model: name of the model.
        """
        asked, all_binary = self.asked, self._body.parameters.binary_data_output
        outputs, blocks = [], []
        for name in asked or answer.outputs:
            values = answer.outputs[name]
            output: dict[str, Any] = {
                "name": name,
                "datatype": "FP32",
                "shape": list(values.shape),
            }
            is_binary = asked[name].binary_data if name in asked else None
            if all_binary if is_binary is None else is_binary:
                blocks.append(values.tobytes())
                output["parameters"] = {"binary_data_size": values.nbytes}
            else:
                output["data"] = values.reshape(-1).tolist()
            outputs.append(output)
        text = _encode(
            {
                "model_name": model,
                "model_version": answer.version,
                **({"id": self._body.id} if self._body.id else {}),
                "parameters": reply_parameters(answer),
                "outputs": outputs,
            }
        )
        if not blocks:
            return text, None
        return b"".join([text, *blocks]), len(text)


def reply_parameters(answer: Answer) -> dict[str, Any]:
    """Returns the parameters of a reply: version, samples of the batch and microseconds before
    it."""
    return {
        "generation": answer.version,
        "batch": answer.batch,
        "queue_us": int(answer.queue_s * 1e6),
    }


def _from_json(tensor: _Tensor, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns the elements of a tensor that are in the JSON, flat or nested as its shape says."""
    shape, text = tensor.shape, bytes(tensor.data)
    if not text:
        raise bad(f"tensor '{tensor.name}' has no data")
    # Of more than the head has promised nothing is decoded.
    commas = text.count(b",")
    if commas >= max(1, prod(shape), shape[0]):
        raise bad(f"tensor '{tensor.name}' has more data than its shape {shape} takes")
    is_float = dtype.kind == "f"
    flat, nested = (_FLOATS, _NESTED_FLOATS) if is_float else (_INTEGERS, _NESTED_INTEGERS)
    problem: Exception | None = None
    for decoder in [flat, nested] if len(shape) == 2 else [flat]:
        try:
            with np.errstate(over="ignore"):  # what is no number in 32 bits is refused later
                array = np.array(decoder.decode(text), dtype=dtype)
        except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
            problem = problem or error
            continue
        if (decoder is flat and array.size == prod(shape)) or list(array.shape) == shape:
            return array.reshape(-1)
        raise bad(
            f"tensor '{tensor.name}' has data of shape {list(array.shape)}, but its shape is "
            f"{shape}"
        )
    raise bad(
        f"tensor '{tensor.name}' has data that is no {tensor.datatype} of shape {shape}: {problem}"
    )

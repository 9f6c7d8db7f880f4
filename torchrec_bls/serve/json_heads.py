"""Bodies of inference requests and replies over HTTP: JSON, with tensors in it or behind it.

Open Inference Protocol v2, with Triton's extension of binary tensors.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchrec_bls.serve.heads import RequestHead, TensorHead
from torchrec_bls.serve.inputs import DTYPES
from torchrec_bls.serve.outcomes import bad
from torchrec_bls.serve.waiting import Answer


class _Tensor(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, Any] = {}
    data: msgspec.Raw = msgspec.Raw()


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class _Body(msgspec.Struct):
    inputs: list[_Tensor]
    id: str = ""
    parameters: dict[str, Any] = {}
    outputs: list[_Output] = []


_DECODER = msgspec.json.Decoder(_Body)
# Of a tensor that is binary. KServe's client writes a list beside one without elements.
_NO_DATA = (b"", b"null", b"[]")
# As gRPC has integers.
_LARGEST = 2**63 - 1
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
        for each in body.inputs:
            if max(each.shape, default=0) > _LARGEST:
                raise bad(f"tensor '{each.name}' has a dimension of more than 64 bits")
        self.head = RequestHead(
            body.id,
            _integer(body.parameters, "timeout", "the request"),
            version,
            tuple(
                TensorHead(each.name, each.datatype, tuple(each.shape), _flag(each, "broadcast"))
                for each in body.inputs
            ),
        )
        self._sizes = [
            _integer(each.parameters, "binary_data_size", f"tensor '{each.name}'")
            for each in body.inputs
        ]
        self.binary_bytes = 0
        for each, size in zip(body.inputs, self._sizes, strict=True):
            if size is None:
                continue
            if size < 0 or bytes(each.data) not in _NO_DATA:
                raise bad(f"tensor '{each.name}' has data twice, or a negative binary_data_size")
            self.binary_bytes += size

    def contents(self, binary: memoryview) -> list[NDArray[Any]]:
        """Returns the elements of each tensor.

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
        for each, size in zip(self._body.inputs, self._sizes, strict=True):
            dtype = DTYPES[each.datatype]
            count = _product(each.shape)
            if size is None:
                array = _from_json(each, dtype)
                if array.size != count:
                    raise bad(
                        f"tensor '{each.name}' has {array.size} elements in data, but its shape "
                        f"{each.shape} has {count}"
                    )
            else:
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
            answer: the answer.
            model: name of the model.

        Raises:
            RequestError: it asks for an output that the model does not have.
        """
        asked = {each.name: each.parameters for each in self._body.outputs}
        unknown = asked.keys() - answer.outputs.keys()
        if unknown:
            raise bad(f"the model has no output '{min(unknown)}', but {sorted(answer.outputs)}")
        all_binary = self._body.parameters.get("binary_data_output") is True
        outputs, blocks = [], []
        for name, values in answer.outputs.items():
            if asked and name not in asked:
                continue
            output: dict[str, Any] = {
                "name": name,
                "datatype": "FP32",
                "shape": list(values.shape),
            }
            if asked.get(name, {}).get("binary_data", all_binary) is True:
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
    is_float = dtype.kind == "f"
    decoders = (_FLOATS, _NESTED_FLOATS) if is_float else (_INTEGERS, _NESTED_INTEGERS)
    text = bytes(tensor.data)
    for decoder in decoders if len(tensor.shape) == 2 else decoders[:1]:
        try:
            return np.array(decoder.decode(text), dtype=dtype).reshape(-1)
        except msgspec.DecodeError:
            continue
        except (ValueError, OverflowError) as error:
            problem = f"tensor '{tensor.name}' has data that is no {tensor.datatype}: {error}"
            raise bad(problem) from error
    numbers = "numbers" if is_float else "integers"
    raise bad(f"tensor '{tensor.name}' has no data that is a list of {numbers}")


def _integer(parameters: Mapping[str, Any], name: str, where: str) -> int | None:
    value = parameters.get(name)
    if value is not None and (
        not isinstance(value, int) or isinstance(value, bool) or abs(value) > _LARGEST
    ):
        raise bad(f"parameter '{name}' of {where} must be an integer of 64 bits")
    return value


def _flag(tensor: _Tensor, name: str) -> bool:
    value = tensor.parameters.get(name, False)
    if not isinstance(value, bool):
        raise bad(
            f"parameter '{name}' of tensor '{tensor.name}' is {value!r}, but must be a boolean"
        )
    return value


def _product(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count

"""Fuzzes what parses requests: python -m tests.serve.fuzz [--cases 10000] [--seed 0].

Valid requests in JSON, JSON with binary tensors and gRPC are damaged, in their bytes and in their
structure. What reads them may refuse them by RequestError, or accept what fits the model. Ends with
an error at the first case that does something else, takes seconds, or at the end if the process
took more than 256 MiB beside the libraries.
"""

import argparse
import copy
import gc
import json
import random
import resource
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2 as messages

from torchrec_bls.serve import grpc_service
from torchrec_bls.serve.inputs import Feature, Features, ModelInputs
from torchrec_bls.serve.json_heads import JsonHead
from torchrec_bls.serve.outcomes import RequestError
from torchrec_bls.serve.raw_contents import split

_ROWS = {"user": 50, "item": 7, "tags": 30}
_COLUMNS, _MOST_SAMPLES = 3, 64
_MOST_MIB, _MOST_SECONDS = 256, 2.0
# With a model that takes weights, and one that takes none.
_INPUTS = [
    ModelInputs([Feature(*each) for each in _ROWS.items()], _COLUMNS, weighted, _MOST_SAMPLES)
    for weighted in (False, True)
]
_NASTY: list[Any] = [
    *(0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, -(2**63), 2**64, 10**400, 1.5, 1e308, -0.0),
    *(None, True, False, "", "user", "ids.values", "dense", "INT64", "INT32", "FP32", "\x00", "é"),
    *([], {}, [[]], [[], []], [[1], [2, 3]], [1] * 100, {"x": {"x": []}}),
]
_BYTES = {"FP32": "<f4", "INT64": "<i8", "INT32": "<i4"}
_TYPED = {"FP32": "fp32_contents", "INT64": "int64_contents", "INT32": "int_contents"}


def fuzz(cases: int, seed: int) -> Counter[str]:
    """Returns how many cases were accepted and refused, by form.

    Raises:
        AssertionError: a case did something else; the text has its seed.
    """
    counts: Counter[str] = Counter()
    slowest = 0.0
    before = _mib()
    for number in range(seed, seed + cases):
        generator = random.Random(number)
        form, read = generator.choice(_FORMS)
        inputs = generator.choice(_INPUTS)
        began = time.process_time()
        try:
            _check(inputs, read(generator, inputs))
            counts[f"{form} accepted"] += 1
        except RequestError as error:
            assert 0 < len(error.text) < 1100, f"case {number}: a text of {len(error.text)}"
            counts[f"{form} refused"] += 1
        except Exception as error:
            raise AssertionError(f"case {number} ({form}): {error!r}") from error
        slowest = max(slowest, time.process_time() - began)
        assert slowest < _MOST_SECONDS, f"case {number} ({form}) took {slowest:.1f} s"
    taken = _mib() - before
    assert taken < _MOST_MIB, f"cases took {taken} MiB"
    counts["slowest case, us"] = int(slowest * 1e6)
    counts["memory, MiB"] = taken
    return counts


def _check(inputs: ModelInputs, features: Features) -> None:
    """Checks that what was accepted fits the model."""
    samples = features.samples
    assert 0 <= samples <= _MOST_SAMPLES
    assert features.values.dtype == np.int64 and features.lengths.dtype == np.int32
    assert features.dense is not None and features.dense.dtype == np.float32
    assert features.dense.shape in ((samples, _COLUMNS), (1, _COLUMNS))
    assert np.isfinite(features.dense).all()
    assert (features.weights is not None) == inputs.is_weighted
    if features.weights is not None:
        assert features.weights.shape == features.values.shape
        assert np.isfinite(features.weights).all()
    value = length = 0
    for feature, count, shared in zip(
        inputs.features, features.counts.tolist(), features.broadcast, strict=True
    ):
        ids = features.values[value : value + count]
        lengths = features.lengths[length : length + (1 if shared else samples)]
        assert len(ids) == count == lengths.sum() and (lengths >= 0).all()
        assert ((ids >= 0) & (ids < feature.rows)).all()
        value, length = value + count, length + len(lengths)
    assert (value, length) == (features.values.size, features.lengths.size)


def _tensors(generator: random.Random, weighted: bool) -> list[dict[str, Any]]:
    """Returns tensors that fit, now and then with an id too many."""
    samples = generator.choice([0, 1, 1, 2, 3, 8, 20])
    made: list[dict[str, Any]] = []

    def add(name: str, datatype: str, shape: list[int], data: list[Any], shared: bool) -> None:
        each = {"name": name, "datatype": datatype, "shape": shape, "data": data}
        made.append(each | ({"parameters": {"broadcast": True}} if shared else {}))

    def add_ragged(prefix: str, rows: list[int], samples: int, shared: bool) -> None:
        lengths = [generator.randrange(4) for _ in range(samples * len(rows))]
        ids = [
            generator.randrange(of_rows)
            for number, of_rows in enumerate(rows)
            for _ in range(sum(lengths[number * samples : (number + 1) * samples]))
        ]
        add(f"{prefix}.values", "INT64", [len(ids)], ids, shared)
        add(f"{prefix}.lengths", "INT32", [len(lengths)], lengths, shared)
        if weighted and generator.random() < 0.5:
            weights = [generator.random() for _ in ids]
            add(f"{prefix}.weights", "FP32", [len(ids)], weights, False)

    shared = generator.random() < 0.2
    count = 1 if shared else samples
    dense = [round(generator.uniform(-3, 3), 3) for _ in range(count * _COLUMNS)]
    add("dense", "FP32", [count, _COLUMNS], dense, shared)
    if generator.random() < 0.3:
        add_ragged("ids", list(_ROWS.values()), samples, False)
        return made
    for name, rows in _ROWS.items():
        shared = generator.random() < 0.2
        count = 1 if shared else samples
        if generator.random() < 0.5:
            add_ragged(name, [rows], count, shared)
        else:
            fixed = generator.randrange(3)
            ids = [generator.randrange(rows) for _ in range(count * fixed)]
            add(name, "INT64", [count, fixed], ids, shared)
    return made


def _in_json(generator: random.Random, inputs: ModelInputs) -> Features:
    tensors = _tensors(generator, inputs.is_weighted)
    binary = b""
    for each in tensors:
        if generator.random() < 0.5:
            content = np.array(each.pop("data"), dtype=_BYTES[each["datatype"]]).tobytes()
            each["parameters"] = {**each.get("parameters", {}), "binary_data_size": len(content)}
            binary += content
        elif len(each["shape"]) == 2 and generator.random() < 0.5:
            flat, (rows, columns) = each["data"], each["shape"]
            each["data"] = [flat[row * columns : (row + 1) * columns] for row in range(rows)]
    tree: dict[str, Any] = {"inputs": tensors, "id": "i", "parameters": {"timeout": 20_000}}
    for _ in range(generator.choice([0, 0, 1, 1, 2])):
        _damage_tree(generator, tree)
    text = json.dumps(tree).encode()
    if generator.random() < 0.3:
        text = _damaged(generator, text)
    if generator.random() < 0.2:
        binary = _damaged(generator, binary)
    request = JsonHead(memoryview(text), "")
    layout = inputs.layout(request.head)
    return inputs.read(layout, request.contents(memoryview(b"?" + binary)[1:]))


def _in_grpc(generator: random.Random, inputs: ModelInputs) -> Features:
    request = messages.ModelInferRequest(model_name="m")
    request.parameters["timeout"].int64_param = 20_000
    is_raw = generator.random() < 0.7
    for each in _tensors(generator, inputs.is_weighted):
        tensor = request.inputs.add(
            name=each["name"], datatype=each["datatype"], shape=each["shape"]
        )
        if "parameters" in each:
            tensor.parameters["broadcast"].bool_param = True
        if is_raw:
            content = np.array(each["data"], dtype=_BYTES[each["datatype"]]).tobytes()
            request.raw_input_contents.append(content)
        else:
            getattr(tensor.contents, _TYPED[each["datatype"]]).extend(each["data"])
    for _ in range(generator.choice([0, 0, 1, 1, 2])):
        _damage_message(generator, request)
    message = request.SerializeToString()
    if generator.random() < 0.3:
        message = _damaged(generator, message)
    text, raw = split(message)
    parsed = grpc_service._parsed(messages.ModelInferRequest, text)
    layout = inputs.layout(grpc_service._head(parsed, None))
    return inputs.read(layout, grpc_service._contents(parsed, raw))


_Form = tuple[str, Callable[[random.Random, ModelInputs], Features]]
_FORMS: list[_Form] = [("JSON", _in_json), ("gRPC", _in_grpc)]


def _damage_tree(generator: random.Random, tree: Any) -> None:
    """Changes one place of JSON."""
    place = tree
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = generator.choice(keys)
        below = place[key]
        if not isinstance(below, (dict, list)) or generator.random() < 0.2:
            break
        place = below
    action = generator.randrange(4)
    if action == 0:
        del place[key]
    elif action == 1:
        place[key] = copy.deepcopy(generator.choice(_NASTY))
    elif action == 2 and isinstance(place, list):
        place.insert(key, copy.deepcopy(place[generator.choice(keys)]))
    elif isinstance(below, int):
        place[key] = below + generator.choice([-1, 1, 1 << generator.randrange(70)])
    else:
        place[key] = [below] * generator.choice([1, 2, 50])


def _damage_message(generator: random.Random, request: Any) -> None:
    """Changes one place of a message."""
    tensor = generator.choice(request.inputs) if request.inputs else request.inputs.add()
    action = generator.randrange(7)
    if action == 0:
        tensor.name = generator.choice(["", "user", "ids.values", "dense", "item.weights", "x"])
    elif action == 1:
        tensor.datatype = generator.choice(["FP32", "INT64", "INT32", "BYTES", ""])
    elif action == 2:
        sizes = [*range(-1, 5), 2**31, 2**62, 2**63 - 1, -(2**63)]
        tensor.shape[:] = [generator.choice(sizes) for _ in range(generator.randrange(4))]
    elif action == 3:
        given = tensor.parameters["broadcast"]
        generator.choice(
            [
                lambda: setattr(given, "bool_param", generator.random() < 0.5),
                lambda: setattr(given, "string_param", "true"),
                lambda: given.Clear(),
            ]
        )()
    elif action == 4 and request.raw_input_contents:
        number = generator.randrange(len(request.raw_input_contents))
        raw = request.raw_input_contents[number]
        request.raw_input_contents[number] = _damaged(generator, raw)
    elif action == 5:
        request.raw_input_contents.append(bytes(generator.randrange(20)))
    elif action == 6:
        request.inputs.add().CopyFrom(tensor)


def _damaged(generator: random.Random, text: bytes) -> bytes:
    """Returns bytes with some changed, taken away or repeated."""
    if not text:
        return bytes(generator.randrange(9))
    made = bytearray(text)
    for _ in range(generator.choice([1, 1, 2, 8])):
        at = generator.randrange(len(made) + 1)
        end = min(len(made), at + generator.choice([1, 1, 4, 8, 64]))
        action = generator.randrange(4)
        if action == 0:
            for place in range(at, min(end, at + 8)):
                made[place] = generator.randrange(256)
        elif action == 1:
            del made[at:end]
        elif action == 2:
            made[at:at] = made[at:end] * generator.choice([1, 2, 100])
        else:
            made[at:at] = generator.choice([b"\x00", b"\xff" * 8, b"[", b"]", b"{", b"9" * 30])
    return bytes(made)


def _mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    """Prints how many requests of each form were accepted and refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first one")
    arguments = parser.parse_args()
    # As the service does: a look at all that the libraries have made takes a fifth of a second.
    gc.collect()
    gc.freeze()
    began = time.monotonic()
    counts = fuzz(arguments.cases, arguments.seed)
    print(f"{dict(sorted(counts.items()))}, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()

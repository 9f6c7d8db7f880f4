"""PyTorch's execution traces: which memory each op of a rank reads and writes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrec_bls.observe.traces.kineto import TraceError, read_json

# All of these have the same fields.
_SCHEMA = re.compile(r"1\.1\.\d+-chakra\.0\.0\.4")
# The fields of a tensor: its number, storage, offset, elements, bytes of an element, and device.
_TENSOR = [int, int, int, int, int, str]


@dataclass(frozen=True)
class Node:
    """An op.

    Attributes:
        name: name of the op.
        first: numbers of the storages of its first argument, which collectives write.
        storages: storages of all arguments.
    """

    name: str
    first: frozenset[int]
    storages: frozenset[int]


def read_execution_trace(path: Path) -> dict[int, Node]:
    """Returns the ops of a rank by their record-function id, which Kineto's events have too.

    `ctrl_deps`, the op that an op is part of, is not read. One thread enters gloo's work and
    another one leaves it. ExecutionTraceObserver does not expect that, and so nests ops that are
    only concurrent.

    Raises:
        TraceError: the file is no execution trace, or has an unknown schema.
        OSError: the file can't be read.
    """
    content = read_json(path)
    nodes = content.get("nodes") if isinstance(content, dict) else None
    if not isinstance(nodes, list):
        raise TraceError(f"{path} has no list of nodes: it is no execution trace")
    schema = str(content.get("schema"))
    if not _SCHEMA.fullmatch(schema):
        raise TraceError(
            f"{path} has schema {schema!r}, but only 1.1.*-chakra.0.0.4 is known here: "
            "record with another torch"
        )
    try:
        ids = [_attribute(node, "rf_id") for node in nodes]
        return {id_: _node(node) for id_, node in zip(ids, nodes, strict=True) if id_}
    except (KeyError, TypeError, IndexError) as error:
        raise TraceError(f"{path} has a node that is none: {error!r}") from error


def _node(node: dict[str, Any]) -> Node:
    values = node["inputs"]["values"]
    first = frozenset(_storages(values[:1]))
    return Node(node["name"], first, frozenset(_storages(values)))


def _attribute(node: dict[str, Any], name: str) -> int:
    return next((int(each["value"]) for each in node["attrs"] if each["name"] == name), 0)


def _storages(value: Any) -> Iterator[int]:
    """Yields the storages of tensors in arguments, which may be lists of lists."""
    if not isinstance(value, list):
        return
    if [type(each) for each in value] == _TENSOR:
        if value[1]:
            yield value[1]
        return
    for each in value:
        yield from _storages(each)

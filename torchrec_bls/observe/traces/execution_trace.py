"""PyTorch's execution traces: which memory each op of a rank reads and writes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Raw, Struct

from torchrec_bls.observe.traces.kineto import MOST_BYTES, TraceError
from torchrec_bls.records import Format, decode

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
    content = _FILE.read(path)
    if not _SCHEMA.fullmatch(content.schema):
        raise TraceError(
            f"{path} has schema {content.schema[:99]!r}, but only 1.1.*-chakra.0.0.4 is known "
            "here: record with another torch"
        )
    nodes = {}
    for number, node in enumerate(content.nodes):
        where = f"{path}: nodes[{number}]"
        for attribute in node.attrs:
            if attribute.name == "rf_id":
                if id_ := decode(attribute.value, int, f"{where}.rf_id", _CURE, TraceError):
                    nodes[id_] = _node(node, where)
                break
    return nodes


class _Attribute(Struct):
    name: str
    value: Raw


class _Inputs(Struct):
    values: Raw


class _NodeRecord(Struct):
    name: str
    attrs: list[_Attribute]
    inputs: _Inputs


class _Content(Struct):
    schema: str
    nodes: list[_NodeRecord]


_CURE = "it is no execution trace: record the job again with torchrec_bls.observe.record_step"
_FILE = Format(_Content, _CURE, TraceError, most_bytes=MOST_BYTES)


def _node(record: _NodeRecord, where: str) -> Node:
    values = decode(record.inputs.values, list[Any], f"{where}.inputs.values", _CURE, TraceError)
    try:
        first = frozenset(_storages(values[:1]))
        return Node(record.name, first, frozenset(_storages(values)))
    except RecursionError:
        raise TraceError(f"{where} has lists too deep in each other: {_CURE}") from None


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

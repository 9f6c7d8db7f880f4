"""Raises an exception at one line after the other of what a call runs through.

It strikes in the thread that calls, in files of the package. It leaves out lines that put things
right: those of `finally` and `except`, and of functions that only close something, with all that is
called from there. When a `with` block is left, its exit is as good as such a line.
"""

import ast
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torchrec_bls

PACKAGE = str(Path(torchrec_bls.__file__).parent)
_CLOSING = {"__exit__", "__del__", "close", "stop", "_end"}

#: A file and a line in it.
Place = tuple[str, int]


@dataclass
class Walk:
    """The way of a call through the files of the package.

    Attributes:
        strike: what is raised there; None only looks.
        at: place at which `strike` is raised, the first time that the call gets there.
        places: all places where it could strike, in the order of the call.
        struck: whether it has.
    """

    strike: Callable[[], BaseException] | None = None
    at: Place | None = None
    places: dict[Place, None] = field(default_factory=dict)
    struck: bool = False
    _entered: dict[FrameType, set[int]] = field(default_factory=dict)

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Follows the calls of this thread."""
        sys.settrace(self._on_call)
        try:
            yield
        finally:
            sys.settrace(None)
            self._entered.clear()

    def _on_call(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._on_line if frame.f_code.co_filename.startswith(PACKAGE) else None

    def _on_line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            place = frame.f_code.co_filename, frame.f_lineno
            if place not in self.places and not self._leaves_with(frame) and _may_fail(frame):
                self.places[place] = None
                if place == self.at and self.strike is not None:
                    self.struck = True
                    raise self.strike()
        elif event == "return":
            self._entered.pop(frame, None)
        return self._on_line

    def _leaves_with(self, frame: FrameType) -> bool:
        headers, _ = _of_file(frame.f_code.co_filename)
        if frame.f_lineno not in headers:
            return False
        entered = self._entered.setdefault(frame, set())
        if frame.f_lineno in entered:
            return True
        entered.add(frame.f_lineno)
        return False


def some_of(places: Sequence[Place], step: int) -> Sequence[Place]:
    """Returns each `step`-th place, or all where a variable asks for it (docs/project/tests.md)."""
    return places if os.environ.get("TORCHREC_BLS_TEST_EVERY_LINE") else places[::step]


def places_of(call: Callable[[], Any]) -> list[Place]:
    """Returns all places where a call may be struck."""
    walk = Walk()
    with walk.traced():
        call()
    return list(walk.places)


def strike(call: Callable[[], Any], at: Place, error: type[BaseException]) -> bool:
    """Makes a call, and raises at a place of it. Returns whether the call went on to its end."""
    walk = Walk(lambda: error("struck"), at)
    try:
        with walk.traced():
            call()
    except BaseException:
        if not walk.struck:
            raise
        return False
    return True


def _may_fail(frame: FrameType | None) -> bool:
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(PACKAGE) and (
            frame.f_code.co_name in _CLOSING or frame.f_lineno in _of_file(name)[1]
        ):
            return False
        frame = frame.f_back
    return True


@cache
def _of_file(name: str) -> tuple[set[int], set[int]]:
    """Returns the lines of heads of `with`, and those where nothing strikes."""
    headers: set[int] = set()
    spared: set[int] = set()

    def walk(node: ast.AST, guarded: bool) -> None:
        if isinstance(node, ast.With):
            headers.update(range(node.lineno, node.body[0].lineno))
        if isinstance(node, ast.Try):
            if guarded:  # a line that does nothing, which the block around it does not cover
                spared.add(node.lineno)
            for each in [*node.finalbody, *node.handlers]:
                spared.update(range(each.lineno, (each.end_lineno or each.lineno) + 1))
        inside = guarded or isinstance(node, ast.With | ast.Try)
        for child in ast.iter_child_nodes(node):
            walk(child, inside and not isinstance(node, ast.FunctionDef))

    walk(ast.parse(Path(name).read_text()), False)
    return headers, spared

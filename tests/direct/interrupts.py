"""Raises an exception at a line of this package, as a signal handler may."""

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any


class Interruption:
    """Raises an error when a line is reached, once.

    Args:
        modules: modules whose lines count.
        error: error to raise.

    Attributes:
        reached: how often each line was reached, by file and number.
    """

    def __init__(self, modules: Iterable[ModuleType], error: type[BaseException]) -> None:
        self.reached: Counter[tuple[str, int]] = Counter()
        self._files = {str(module.__file__) for module in modules}
        self._error = error
        self._at: tuple[str, int] | None = None
        self._times = 0

    @contextmanager
    def at(self, line: tuple[str, int] | None, times: int = 1) -> Iterator[None]:
        """Raises when a line is reached for the `times`-th time; never if it is None."""
        self.reached.clear()
        self._at, self._times = line, times
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)

    def _enter(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        file = frame.f_code.co_filename
        if file not in self._files:
            return None
        spared, entered = spared_lines(file), set()

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            if event != "line" or frame.f_lineno in spared:
                return trace
            # A with statement is reached again when it is left, which a signal can't interrupt.
            if frame.f_lineno in with_lines(file):
                if frame.f_lineno in entered:
                    return trace
                entered.add(frame.f_lineno)
            line = file, frame.f_lineno
            self.reached[line] += 1
            if line == self._at and self.reached[line] == self._times:
                self._at = None
                sys.settrace(None)
                raise self._error
            return trace

        return trace


@cache
def spared_lines(file: str) -> frozenset[int]:
    """Returns the lines that are not interrupted: of clean-ups, which nothing could clean up."""
    spared: set[int] = set()
    for node in ast.walk(ast.parse(Path(file).read_text())):
        bodies: list[Any] = []
        if isinstance(node, ast.Try):
            bodies = [*node.finalbody, *node.handlers]
        elif isinstance(node, ast.FunctionDef) and node.name in ("__exit__", "__del__", "close"):
            bodies = node.body
        for body in bodies:
            spared.update(range(body.lineno, body.end_lineno + 1))
    return frozenset(spared)


@cache
def with_lines(file: str) -> frozenset[int]:
    nodes = ast.walk(ast.parse(Path(file).read_text()))
    return frozenset(
        line
        for node in nodes
        if isinstance(node, ast.With)
        for line in range(node.lineno, node.body[0].lineno)
    )

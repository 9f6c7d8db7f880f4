"""Calls of functions that may hang, such as those of a store whose host has stopped."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class TooLateError(Exception):
    """A function did not return in time."""


def within(seconds: float, function: Callable[[], T]) -> T:
    """Returns `function()`. Raises TooLateError after `seconds`, and leaves the function's thread
    behind: with a store whose host hangs, the function cannot end otherwise. The same happens when
    a signal's handler raises, since its exception would otherwise wait for the function's
    return."""
    result: Future[T] = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=call, name="torchrec_bls rendezvous", daemon=True)
    thread.start()
    thread.join(seconds)
    if not result.done():
        raise TooLateError
    return result.result()

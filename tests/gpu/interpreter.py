"""Triton's interpreter, with the arithmetic of GPUs."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, TensorHandle

_fmaf = ctypes.CDLL("libm.so.6").fmaf
_fmaf.argtypes, _fmaf.restype = [ctypes.c_float] * 3, ctypes.c_float
_fma = np.vectorize(_fmaf, otypes=[np.float32])
_replaced: set[Any] = set()


def prepare() -> None:
    """Makes `fma` round once, where interpreters before Triton 3.9 round the product before they
    add to it; and calls of functions in kernels fast."""
    InterpreterBuilder.create_fma = _fused
    InterpretedFunction.__call__ = _called


def _fused(
    _: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle
) -> TensorHandle:
    return TensorHandle(_fma(x.data, y.data, z.data), z.dtype.scalar)


def _called(self: InterpretedFunction, *arguments: Any, **named: Any) -> Any:
    # A launch replaces what the language has, and restores it. Triton does so for each call of a
    # function within, too, which takes longer than the call, and leaves that in place.
    if self.fn not in _replaced:
        interpreter._patch_lang(self.fn)
        _replaced.add(self.fn)
    return self.rewrite()(*arguments, **named)

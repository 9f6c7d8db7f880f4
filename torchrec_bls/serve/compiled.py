"""The dense part of a model, compiled where that is faster."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from torchrec_bls.direct.reads.attached_collection import AttachedCollection
from torchrec_bls.errors import named
from torchrec_bls.serve.fused import DotProducts
from torchrec_bls.serve.model_calls import ENOUGH, Measured, times_as_fast

#: Folder beside a checkpoint that keeps compiled code for the next start.
FOLDER = ".torchrec-bls-compiled"
# Modules that native code runs, for which there is nothing to compile.
_NATIVE = AttachedCollection, DotProducts


def compile_if_faster(
    model: nn.Module, measure: Callable[[], Measured], checkpoint: str
) -> tuple[Measured, str]:
    """Compiles the modules of a model that have no tables in them, and leaves them so if batches
    are faster then. Nothing is compiled afterwards: what new code would be needed for runs as it
    is.

    Args:
        model: the model, which has attached to its tables.
        measure: function that calls it with batches of several sizes.
        checkpoint: path of the checkpoint that it was loaded from.

    Returns:
        The times of its batches, and a text for the log.
    """
    measure()  # else what is measured first is slower, since its code and data are not in caches
    plain = measure()
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        return plain, f"the dense part is not compiled: there is no compiler {compiler}"
    # Else processes that compile would stay.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    keep_in = Path(checkpoint).absolute().parent
    if os.access(keep_in, os.W_OK):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(keep_in / FOLDER))
    parts = dense_parts(model)
    for part in parts:
        part.compile(dynamic=True)
    try:
        measure()  # compiles
        compiled = measure()
    except Exception as error:
        _undo(parts)
        return plain, f"the dense part is not compiled: {named(error)}"
    factor = times_as_fast(plain, compiled)
    if factor < ENOUGH:
        _undo(parts)
        return plain, f"the dense part is left as it is: compiled, it is {factor:.2f} times as fast"
    torch.compiler.set_stance("eager_on_recompile")
    return compiled, f"the dense part is compiled, which makes batches {factor:.2f} times as fast"


def dense_parts(model: nn.Module) -> list[nn.Module]:
    """Returns the largest modules in a model that have neither tables nor native code in them."""
    if isinstance(model, _NATIVE):
        return []
    if not any(isinstance(each, _NATIVE) for each in model.modules()):
        return [model]
    return [part for child in model.children() for part in dense_parts(child)]


def _undo(parts: Sequence[nn.Module]) -> None:
    for part in parts:
        part._compiled_call_impl = None

"""The wait of an owner until a reader has what only the owner may have so far."""

import os
import time
from collections.abc import Sequence

from torchrec_bls import _native
from torchrec_bls.direct.file_holders import File, holds_all
from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.serving.readers import readers_of

_PAUSE = 0.005


def await_a_holder(
    page: _native.ControlPage, newest: Sequence[Generation], deadline: float
) -> bool:
    """Waits until a reader in another process has mapped a version, so that it outlives this
    process. Without readers there is nobody to wait for.

    Args:
        page: control page of the first module.
        newest: generation of each module, of that version.
        deadline: seconds to wait.

    Returns:
        False if no reader had mapped it by then.
    """
    files = {
        _file_of(descriptor)
        for generation in newest
        for part in generation.parts
        for descriptor in part.descriptors
    }
    end = time.monotonic() + deadline
    while others := readers_of(page).keys() - {os.getpid()}:
        if any(holds_all(pid, files) for pid in others):
            break
        if time.monotonic() >= end:
            return False
        time.sleep(_PAUSE)
    return True


def _file_of(descriptor: int) -> File:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino

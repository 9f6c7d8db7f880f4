"""The wait of an owner that ends until a reader has what only the owner may have so far."""

import os
import time

from torchrec_bls.direct.file_holders import File, holds_all
from torchrec_bls.direct.serving.readers import readers_of
from torchrec_bls.direct.serving.served_model import ServedModel

_PAUSE = 0.005


def await_a_holder(served: ServedModel, deadline: float) -> bool:
    """Waits until a reader in another process has mapped the version that this process reads, so
    that the version outlives this process. Without readers there is nobody to wait for.

    Args:
        served: model of this process.
        deadline: seconds to wait.

    Returns:
        False if no reader had mapped it by then.
    """
    newest = served.publisher.follower.newest
    files = {
        _file_of(descriptor)
        for generation in newest
        for part in generation.parts
        for descriptor in part.descriptors
    }
    end = time.monotonic() + deadline
    while others := readers_of(served.reads[0].tables.page).keys() - {os.getpid()}:
        if any(holds_all(pid, files) for pid in others):
            break
        if time.monotonic() >= end:
            return False
        time.sleep(_PAUSE)
    return True


def _file_of(descriptor: int) -> File:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino

"""Tables of uses and faults, whose cells one set of processes plays one after the other."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from torchrec_bls.errors import named


@contextmanager
def cell(*names: object) -> Iterator[None]:
    """Names the cell in which a test fails, and has all ranks end it before the next one begins."""
    try:
        yield
    except BaseException as error:
        raise AssertionError(f"{', '.join(map(str, names))}: {named(error)}") from error
    dist.barrier()  # in which no rank answers another

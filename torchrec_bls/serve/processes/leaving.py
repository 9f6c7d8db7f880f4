"""The end of a process that has a model."""

import logging
import os
from typing import NoReturn

from torchrec_bls.lifetime import end_all


def leave() -> NoReturn:
    """Ends this process. What others could miss is undone. The interpreter's own end is left out:
    it frees all objects of torch one by one, which takes seconds at a low priority."""
    status = 1
    try:
        end_all()
        status = 0
    finally:
        logging.shutdown()
        os._exit(status)

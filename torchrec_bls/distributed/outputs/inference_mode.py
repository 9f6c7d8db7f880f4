"""Lookups under torch.inference_mode."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def outside_inference_mode(look_up: Callable[P, R]) -> Callable[P, R]:
    """Decorates a method that calls FBGEMM, whose CPU lookups are found by their autograd key.

    Inference mode takes the key away. Without gradients the results are the same.
    """

    @wraps(look_up)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_inference_mode_enabled():
            return look_up(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return look_up(*args, **kwargs)

    return call

"""Stores the training's iteration in the checkpoints of modules whose error bounds depend on it."""

from typing import Any

import torch

_NAME = "bls_iterations"


def keep_in_checkpoints(module: Any) -> None:
    """Makes the state dict of a bounded-lag module hold its iteration, and loading one set it.

    A state dict without it leaves the iteration as it is.
    """
    module.register_state_dict_post_hook(_add)
    module.register_load_state_dict_pre_hook(_take)


def _add(module: Any, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    state_dict[prefix + _NAME] = torch.tensor(module._bls.iterations)


def _take(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    # It is taken out, since no parameter has this name.
    iterations = state_dict.pop(prefix + _NAME, None)
    if iterations is not None:
        module._bls.iterations = int(iterations)

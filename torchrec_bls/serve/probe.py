"""What a new version has to pass before a service answers by it."""

import numpy as np
from torch import nn

from torchrec_bls.serve.inputs import Feature
from torchrec_bls.serve.model_calls import ModelCalls, made_up

_SAMPLES, _IDS = 64, 2


class FiniteAnswers:
    """A probe: a model's answers to a request that is made up are numbers.

    Args:
        features: features of the model.
        is_weighted: whether its ids have weights.
        dense_columns: number of its dense features; None: it is found.
    """

    def __init__(
        self, features: tuple[Feature, ...], is_weighted: bool, dense_columns: int | None
    ) -> None:
        self._features = features
        self._is_weighted = is_weighted
        self._dense_columns = dense_columns

    def __call__(self, model: nn.Module) -> None:
        """Raises ValueError unless the answers are numbers.

        Args:
            model: a copy of the model with the new version.
        """
        calls = ModelCalls(model, [each.name for each in self._features], self._dense_columns)
        rows = np.array([each.rows for each in self._features])
        request = made_up(_SAMPLES, _IDS, rows, calls.dense_columns, self._is_weighted)
        for name, values in calls.answered([request]).items():
            wrong = np.argwhere(~np.isfinite(values))
            if len(wrong):
                place = tuple(wrong[0].tolist())
                raise ValueError(
                    f"{values[place]} at {list(place)} of '{name}' ({len(wrong)} of {values.size} "
                    "are no finite numbers)"
                )

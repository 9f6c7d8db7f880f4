"""The model of `served`, of which every second version changes some tables alone."""

from typing import Any

import torch

from tests.quant import served

# Two of the quantized tables, and the dense weights.
CHANGED = ("bags.embedding_bags.b2.", "rows.embeddings.r0.", "dense.")

check = served.check
number_of = served.number_of
bare_model = served.bare_model
batches_of = served.batches_of
sharded = served.sharded


def weights_of(number: int) -> dict[str, torch.Tensor]:
    """Returns all weights of a version. Those of an odd one after the first are the weights of the
    version before, except for `CHANGED`."""
    new = served.weights_of(number)
    if number == 1 or number % 2 == 0:
        return new
    before = served.weights_of(number - 1)
    return {name: (new if name.startswith(CHANGED) else before)[name] for name in new}


class Expected(served.Expected):
    """See `served.Expected`."""

    def _model(self, number: int) -> Any:
        model = served.Model()
        model.load_state_dict(weights_of(number))
        return served.quantized(model)

"""New weights for models that read their tables directly, while the models serve.

docs/design/generations.md describes the protocol, and says why no batch sees two generations.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from torchrec_bls.collective.transport.deadlines import check_deadline
from torchrec_bls.direct.arguments import check_owner
from torchrec_bls.direct.serving.publisher import Publication
from torchrec_bls.direct.serving.served_model import ServedModel, reading_modules
from torchrec_bls.direct.serving.serving_state import ServingState


def publish(
    model: nn.Module,
    state_dict: Mapping[str, Any] | None = None,
    *,
    owner: int | None = None,
    deadline: float = 60.0,
) -> Publication:
    """Announces this rank's part of the next generation of a model's weights.

    It is no collective: each rank calls it at its own time, in any thread, while batches are
    served. Once all ranks have called it, each process changes to the new generation between two of
    its batches, in all tables and the dense weights at once. Until then, and if one of the calls
    fails, all ranks stay with the old one. Afterwards the model's parameters show the new
    generation.

    There is memory for both generations until all processes have changed. A process without
    batches keeps its generation until its next batch, even if several were published since.

    Args:
        model: a DistributedModelParallel, or a module in it, that has been called once; or an
            attached model. Later calls of it see new generations.
        state_dict: new weights, with all names of `model.state_dict()`. Tables are whole tensors,
            or ShardedTensors with this rank's shards. Dense weights are copied. None: the weights
            that the model has now, e.g. after `load_state_dict`. If they were written to, this
            process's next batches raise until all ranks have published.
        owner: rank whose process is gone; this process publishes its tables. That takes a state
            dict with the tables as whole tensors. If the state dict has all dense weights as well,
            they are published for processes that only read.
        deadline: seconds until all ranks must have announced the generation before.

    Raises:
        ValueError: the model does not read all its tables directly or has quantized ones, a weight
            is missing or of a wrong shape, dtype, layout or device, or the owner is no rank or
            alive. Or a table's parameter was replaced or converted; dense state can't be loaded, or
            not be handed to other processes; or weights were written to before this process saw
            the newest generation. Nothing is announced.
        RendezvousError: there is no memory for two generations. Nothing is announced.
        PeerTimeoutError: a rank has not announced the generation before; the text names such ranks.
    """
    check_deadline(deadline)
    served = ServedModel.of(model)
    if owner is not None:
        check_owner(owner, served.reads[0].tables.owners)
    if owner is not None and owner != served.rank:
        return served.publish_for(owner, state_dict, deadline)
    return served.publish(state_dict, deadline)


def generation_of(model: nn.Module) -> int:
    """Returns the generation of the weights that the last batch of `model` saw, counted from 1.
    Returns 0 if tables are not read directly, and before the first batch."""
    return next(iter(reading_modules(model).values())).generation


def serving_state(model: nn.Module) -> ServingState:
    """Returns what this process serves of a model, and which ranks' processes are gone.

    Args:
        model: model as for `publish`.

    Raises:
        ValueError: the model does not read all its tables directly.
    """
    return ServedModel.of(model).state()

"""What a service makes of a model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrec_bls.serve.contract import Contract
from torchrec_bls.serve.places import Places

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Plan:
    """What a zygote makes, and its workers do.

    Attributes:
        build: function that returns the model; it can be imported.
        place: what it is called in messages.
        name: name of the model in requests.
        checkpoint: path of the first checkpoint; compiled code is kept beside it.
        tables: path of the keeper's socket.
        contract: what is promised to callers.
        dense_features: number of the model's dense features; None: it is found.
        compile: whether the dense part is compiled where that is faster.
        access_log: whether workers write a line for each request.
        places: where requests come in.
    """

    build: "Callable[[], nn.Module]"
    place: str
    name: str
    checkpoint: str
    tables: str
    contract: Contract
    dense_features: int | None
    compile: bool
    access_log: bool
    places: Places

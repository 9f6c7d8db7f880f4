"""Deltas that have come into a directory, and the versions that they are applied to."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from torchrec_bls.checkpoints import Delta
from torchrec_bls.direct.keeping.checkpoint_weights import Order, is_of_checkpoint
from torchrec_bls.direct.serving.served_model import ServedModel

_Rows = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
_Dense = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class FoundDelta:
    """A complete delta.

    Attributes:
        path: its folder.
        version: version that it makes.
        base: version that it is applied to, or the name of the checkpoint that makes that.
        trained: see Delta.
        identity: see Delta.
        order: its order among other deltas and checkpoints, the newest last.
    """

    path: Path
    version: str
    base: str
    trained: float
    identity: str
    order: Order

    @classmethod
    def at(cls, path: Path, order: Order) -> "FoundDelta":
        """Returns the delta at a path. Raises ValueError if there is none that is complete."""
        with Delta(path) as found:
            return cls(path, found.version, found.base, found.trained, found.identity, order)

    def follows(self, version: str, since: Order | None) -> bool:
        """Returns whether it can be applied to a version.

        Args:
            version: name of the version.
            since: order of the files that have made the version; None: they are unknown. A
                checkpoint that was written anew has its old name, and older deltas are not of it.
        """
        if self.base == version:
            return True
        return since is not None and since < self.order and is_of_checkpoint(version, self.base)

    def read(self, model: nn.Module) -> tuple[_Rows, _Dense]:
        """Returns rows and dense weights as `publish_rows` takes them. Dense weights that the model
        lacks are left out, as those of a checkpoint are.

        Args:
            model: model that serves.

        Raises:
            ValueError: the files have changed since they were found, or can't be read.
        """
        with Delta(self.path) as found:
            if found.identity != self.identity:
                raise ValueError(f"{self.path} has changed since it was found")
            return found.rows(), ServedModel.of(model).known_dense(model, found.dense())

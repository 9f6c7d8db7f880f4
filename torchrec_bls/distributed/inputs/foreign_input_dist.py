"""Refuses wrappers that exchange the ids of a sharded module in its place."""

from typing import Any


class OwnInputDist:
    """Mix-in of the sharded modules, which makes sure that their own input dist is used.

    The embeddings go back by the layout that this input dist leaves.
    """

    _input_dists: list[Any]  # from TorchRec

    @property
    def _has_uninitialized_input_dist(self) -> bool:
        """Returns TorchRec's mark of a module that has had no batch yet."""
        return self._bls_has_no_input_dist

    @_has_uninitialized_input_dist.setter
    def _has_uninitialized_input_dist(self, value: bool) -> None:
        # TorchRec's ManagedCollision modules remove the mark without a batch. They have their own
        # input dists, and call only `compute` and `output_dist`.
        if not value and not self._input_dists:
            raise ValueError(
                f"{type(self).__name__} is sharded inside of a ManagedCollision module, which "
                "exchanges ids itself, in steps that have no bound and leave no layout for the way "
                "back: give ManagedCollisionEmbeddingCollectionSharder and "
                "ManagedCollisionEmbeddingBagCollectionSharder TorchRec's own sharders"
            )
        self._bls_has_no_input_dist = value

"""Versions of which most differ in some rows and dense weights from the one before. Each tenth one
is another whole."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from tests.direct.nodes import DEADLINE, Node
from tests.direct.test_keeper import kept

WHOLE = 10

Weights = Mapping[str, torch.Tensor]


def is_whole(number: int) -> bool:
    """Returns whether a version is published as a whole."""
    return number == 1 or number % WHOLE == 0


def go_on(node: Node, number: int, deadline: float = DEADLINE) -> None:
    """Publishes a version that follows the one before."""
    made, version = kept(node), str(number)
    if is_whole(number):
        made.publish(node.served.weights_of(number), version=version, deadline=DEADLINE)
    else:
        made.publish_rows(
            node.served.delta_of(number),
            version=version,
            base=str(number - 1),
            dense=node.served.dense_of(number),
            deadline=deadline,
        )


class RowVersions:
    """The weights of each version.

    Args:
        whole: module with the weights of whole versions, see `served`.
    """

    def __init__(self, whole: Any) -> None:
        self._whole = whole
        self.weights_of = lru_cache(maxsize=4)(self._weights_of)

    def delta_of(self, number: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Returns the rows in which a version differs from the one before. Some come twice, and the
        last one counts."""
        generator = torch.Generator().manual_seed(number)

        def some(most: int, *size: int) -> torch.Tensor:
            return torch.randint(0, most, size, generator=generator)

        delta = {}
        for name, weight in self.weights_of(1).items():
            if name.startswith("dense") or int(some(3)) == 0:
                continue
            rows, columns = weight.shape
            count = int(some(max(2, rows // 3)))
            delta[name] = some(rows, count), some(2000, count, columns).float() - 1000
        return delta

    def dense_of(self, number: int) -> dict[str, torch.Tensor] | None:
        """Returns the dense weights in which a version differs from the one before: all of them,
        some, or None."""
        if number % 5 == 4:
            return None
        generator = torch.Generator().manual_seed(5000 + number)
        dense = [each for each in self.weights_of(1).items() if each[0].startswith("dense")]
        return {
            name: torch.randint(-1000, 1000, value.shape, generator=generator).float()
            for name, value in dense[number % 2 :]
        }

    def _weights_of(self, number: int) -> Weights:
        if is_whole(number):
            found: Weights = self._whole.weights_of(number)
            return found
        weights = {name: weight.clone() for name, weight in self.weights_of(number - 1).items()}
        for name, (ids, rows) in self.delta_of(number).items():
            for each, row in zip(ids.tolist(), rows, strict=True):
                weights[name][each] = row
        return {**weights, **(self.dense_of(number) or {})}

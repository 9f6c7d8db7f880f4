"""The bounded-lag loop: Listing 2 of the BLS paper."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import torch

from dlrm_plain.data import Batch
from dlrm_plain.exchange import EmbeddingExchange
from dlrm_plain.model import Dlrm


def infer(
    model: Dlrm, batches: Iterable[Batch], exchange: EmbeddingExchange, bound: int
) -> Iterator[torch.Tensor]:
    """Yields the logits of this rank's rows, batch by batch in order, each `bound` batches late.

    A rank goes on to the next batch while its exchanges of the last `bound` batches are under way.
    So ranks may be up to `bound` batches apart. With bound 0 this is Listing 1, the loop of the
    original DLRM.
    """
    unfinished: deque[torch.Tensor] = deque()  # the bottom MLP's outputs, newest last
    for batch in batches:
        exchange.post(model.apply_emb(batch.ids, batch.offsets))
        unfinished.append(model.apply_bottom(batch.dense))
        if len(unfinished) > bound:
            yield model.apply_top(unfinished.popleft(), exchange.wait())
    while unfinished:
        yield model.apply_top(unfinished.popleft(), exchange.wait())

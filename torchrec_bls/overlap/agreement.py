"""Errors of one rank that all ranks raise, since the others would wait for it."""

import torch.distributed as dist


def raise_together(error: ValueError | None, group: dist.ProcessGroup) -> None:
    """Raises `error` on this rank, and an error with its text on all others; collective.

    Args:
        error: error of this rank; None if all is well here.
        group: the ranks that call it.

    Raises:
        ValueError: a rank has an error; the text names it.
    """
    texts: list[str | None] = [None] * group.size()
    dist.all_gather_object(texts, None if error is None else str(error), group)
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise ValueError(f"rank {rank}: {text}")

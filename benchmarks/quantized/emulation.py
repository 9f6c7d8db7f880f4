"""Quantized collectives of many nodes in one process. Results equal those of real nodes bit for
bit.

One tensor has the values of all N nodes. The codecs of real messages encode and decode what nodes
send. `torchrec_bls.collective.quantized` has the same collectives with messages.
"""

import torch

from torchrec_bls.codecs.rows import Codec, round_trip
from torchrec_bls.collective.quantized import check_groups, drop_what_is_not_finite


def all_to_all(rows: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Returns rows [rows, columns] as they arrive (section 3.3)."""
    return round_trip(rows, codec)


def ring_all_reduce(
    values: torch.Tensor, codec: Codec, error: torch.Tensor | None = None
) -> torch.Tensor:
    """Sums over nodes that pass parts of their rows around a ring (algorithm 2).

    Finished sums travel as they were encoded first. The paper encodes them again at each step,
    which changes them by at most a rounding.

    Args:
        values: rows of all nodes, [nodes, rows, columns], float32.
        codec: codec of the messages.
        error: rounding errors by node, in the shape of `values`, zero at first. They are added the
            next time. Updated in place; zero where a sum is not finite. None: no compensation.

    Returns:
        [rows, columns], the same on all nodes.
    """
    nodes = values.shape[0]
    if nodes == 1:
        return values[0].clone()
    result = torch.empty_like(values[0])
    # Parts of one size go around together; tensor_split makes at most two sizes.
    size, larger = divmod(values.shape[1], nodes)
    boundary = larger * (size + 1)
    for first, count, rows in (
        (0, larger, slice(0, boundary)),
        (larger, nodes - larger, slice(boundary, None)),
    ):
        if count and result[rows].numel():
            parts = torch.unflatten(values[:, rows], 1, (count, -1))
            lost = None if error is None else torch.unflatten(error[:, rows], 1, (count, -1))
            _ring_of_parts(parts, first, codec, lost, torch.unflatten(result[rows], 0, (count, -1)))
    return result


def _ring_of_parts(
    values: torch.Tensor,
    first: int,
    codec: Codec,
    error: torch.Tensor | None,
    result: torch.Tensor,
) -> None:
    """Sums parts [nodes, parts, rows, columns] with the numbers from `first` on into `result`."""
    # Part k starts at node k - 1 and is summed at nodes k, k + 1, ...
    total = _round_trip(torch.cat(_at(values, first, -1)), codec)
    for step in range(values.shape[0] - 1):
        for held in (values, error):
            if held is not None:
                at = _at(held, first, step)
                pieces = torch.split(total, [len(own) for own in at])
                for piece, own in zip(pieces, at, strict=True):
                    piece += own
        exact, total = total, _round_trip(total, codec)
        if error is not None:
            at = _at(error, first, step)
            sizes = [len(own) for own in at]
            for lost, was, is_now in zip(
                at, torch.split(exact, sizes), torch.split(total, sizes), strict=True
            ):
                drop_what_is_not_finite(torch.sub(was, is_now, out=lost))
    result.copy_(total)


def _at(held: torch.Tensor, first: int, step: int) -> list[torch.Tensor]:
    """Returns what node k + step has of part k, as views [parts, rows, columns] in order."""
    nodes, parts = held.shape[:2]
    begin = (first + step) % nodes
    unwrapped = min(parts, nodes - begin)
    views = [held[begin : begin + unwrapped, :unwrapped]]
    if unwrapped < parts:
        views.append(held[: parts - unwrapped, unwrapped:])
    return [view.diagonal(dim1=0, dim2=1).movedim(-1, 0) for view in views]


def recursive_doubling_all_reduce(
    values: torch.Tensor,
    codec: Codec,
    error: torch.Tensor | None = None,
    group_size: int = 8,
) -> torch.Tensor:
    """Sums within groups of nodes, then over pairs of groups, pairs of pairs, ... (algorithms 3 to
    5; the paper's groups have 8 nodes).

    Args:
        values, codec, error: see `ring_all_reduce`.
        group_size: number of nodes that are connected with each other; all of them if there are
            fewer.

    Returns:
        [rows, columns], the same on all nodes.

    Raises:
        ValueError: the number of groups is not a power of two. Or `error` is given and there is
            only one group, while only sums of pairs of groups have errors.
    """
    nodes = values.shape[0]
    group_size = check_groups(nodes, group_size, compensated=error is not None)
    if nodes == 1:
        return values[0].clone()
    of_members = values.tensor_split(group_size, dim=1)
    errors = [None] * group_size if error is None else error.tensor_split(group_size, dim=1)
    results = []
    for member, (mine, lost) in enumerate(zip(of_members, errors, strict=True)):
        in_groups = torch.unflatten(mine, 0, (nodes // group_size, group_size))
        sums = in_groups[:, member].clone()
        for other in range(group_size):
            if other != member:
                sums += _round_trip(in_groups[:, other], codec)
        own_lost = (
            torch.unflatten(lost, 0, (nodes // group_size, group_size))[:, member]
            if lost is not None
            else None
        )
        results.append(_reduce_pairs(sums, codec, own_lost))
    return torch.cat(results)


def _reduce_pairs(sums: torch.Tensor, codec: Codec, error: torch.Tensor | None) -> torch.Tensor:
    """Reduces [nodes, rows, columns]; see `recursive_doubling_all_reduce`."""
    if len(sums) == 1:
        return _round_trip(sums, codec)[0]
    half = len(torch.arange(sums.shape[1]).tensor_split(2)[0])
    halves = (slice(0, half), slice(half, None))
    positions = torch.arange(len(sums))
    while len(sums) > 1:
        reduced = []
        for own, rows in enumerate(halves):
            exact = sums[own::2, rows] + _round_trip(sums[1 - own :: 2, rows], codec)
            keepers = positions[own::2]
            if error is not None:
                exact += error[keepers, rows]
            total = _round_trip(exact, codec)
            if error is not None:
                error[keepers, rows] = drop_what_is_not_finite(exact - total)
            reduced.append(total)
        sums = torch.cat(reduced, dim=1)
        positions = positions[1::2]
    return sums[0]


def _round_trip(values: torch.Tensor, codec: Codec) -> torch.Tensor:
    flat = values.reshape(-1, values.shape[-1])
    return round_trip(flat, codec).view(values.shape)

"""All-reduce whose messages are quantized (Quantized Collectives, section 3.4)."""

import torch
import torch.distributed as dist

from torchrec_bls import _native
from torchrec_bls.codecs.rows import Codec, decode, encode

ALGORITHMS = ("ring", "recursive_doubling")

_LENGTH_BYTES = 8


def quantized_all_reduce(
    rows: torch.Tensor,
    group: dist.ProcessGroup,
    *,
    codec: Codec,
    algorithm: str = "ring",
    error: torch.Tensor | None = None,
    group_size: int = 8,
) -> None:
    """Sums `rows` over the ranks of a group in place, with the same bits on all of them.

    Sums are quantized at each step. The ring has world size - 1 steps. Recursive doubling has the
    logarithm of the number of groups, and quantizes only once within groups.

    Args:
        rows: float32 on CPU, [rows, columns], contiguous. Each rank sends parts of the rows. Each
            row has a scale of its own.
        group: ranks; its backend has to send and receive (gloo).
        codec: codec of the messages.
        algorithm: "ring" (algorithm 2), for any world size, or "recursive_doubling" (algorithms 3
            to 5), which compensates the sums of pairs of groups, not those within a group.
        error: rounding errors, in the shape of `rows`, zero at first and updated in place. They are
            added the next time (algorithm 1). Zero where a sum is not finite. None: no
            compensation.
        group_size: ranks of a group in recursive doubling, which are connected with each other.

    Raises:
        ValueError: `rows` or `error` is another kind of tensor, or the world size does not fit. Or
            all ranks are one group of recursive doubling, so that `error` would have no effect.
    """
    _check(rows, error, algorithm)
    ranks = _Ranks(group, codec)
    if algorithm == "ring":
        _ring(ranks, rows, error)
    else:
        group_size = check_groups(ranks.size, group_size, compensated=error is not None)
        _recursive_doubling(ranks, rows, error, group_size)


def check_groups(ranks: int, group_size: int, *, compensated: bool) -> int:
    """Returns the number of ranks in a group of recursive doubling.

    Raises:
        ValueError: the number of groups is not a power of two, or compensation would do nothing.
    """
    if group_size < 1:
        raise ValueError(f"group_size is {group_size}, but must be positive")
    group_size = min(group_size, ranks)
    groups, left = divmod(ranks, group_size)
    if left or groups & (groups - 1):
        raise ValueError(
            f"recursive doubling needs a power of two of groups of {group_size} ranks, but there "
            f"are {ranks} ranks: choose another group_size, or the ring, which takes any number"
        )
    if compensated and groups == 1 < ranks:
        raise ValueError(
            f"recursive doubling compensates the sums of pairs of groups only, but all {ranks} "
            "ranks are one group: choose a smaller group_size, no compensation, or the ring"
        )
    return group_size


def drop_what_is_not_finite(error: torch.Tensor) -> torch.Tensor:
    """Sets errors of NaN and infinite sums to zero in place and returns the errors. Otherwise they
    would spoil every later sum."""
    return error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def _check(rows: torch.Tensor, error: torch.Tensor | None, algorithm: str) -> None:
    if algorithm not in ALGORITHMS:
        raise ValueError(
            f"algorithm is {algorithm!r}, but has to be one of {', '.join(ALGORITHMS)}"
        )
    for name, tensor in (("rows", rows), ("error", error)):
        if tensor is None:
            continue
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, not float32 on cpu")
        if tensor.dim() != 2 or not tensor.is_contiguous() or tensor.shape != rows.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, but rows "
                "and error must be contiguous matrices of one shape"
            )


class _Ranks:
    """Sends rows to ranks of a group and receives them.

    Args:
        group: the ranks.
        codec: codec of all messages.
    """

    def __init__(self, group: dist.ProcessGroup, codec: Codec) -> None:
        self._group = group
        self._codec = codec
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._sending: list[tuple[dist.Work, torch.Tensor]] = []

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the message for `rows`."""
        return encode(rows, self._codec)

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Decodes a message into `out`."""
        return decode(message, self._codec, out)

    def quantize(self, rows: torch.Tensor, error: torch.Tensor | None) -> torch.Tensor:
        """Adds `error` to `rows`, quantizes them in place and keeps the rounding error in `error`.
        Returns the message for the rows."""
        if error is not None:
            rows += error
            error.copy_(rows)
        message = self.encode(rows)
        self.decode(message, rows)
        if error is not None:
            drop_what_is_not_finite(error.sub_(rows))
        return message

    def send(self, message: torch.Tensor, shape: torch.Size, to: int) -> None:
        """Sends the message for rows of `shape`; `flush` waits until it has left."""
        usual = self._usual_bytes(shape)
        # Rows that are not finite make the message longer than its receiver expects.
        first = torch.empty(_LENGTH_BYTES + usual, dtype=torch.uint8)
        first[:_LENGTH_BYTES].view(torch.int64)[0] = message.numel()
        first[_LENGTH_BYTES:] = message[:usual]
        self._post(first, to)
        if message.numel() > usual:
            self._post(message[usual:], to)

    def receive(self, shape: torch.Size, source: int) -> torch.Tensor:
        """Returns the message for rows of `shape` from a rank."""
        usual = self._usual_bytes(shape)
        first = torch.empty(_LENGTH_BYTES + usual, dtype=torch.uint8)
        self._fetch(first, source)
        length = int(first[:_LENGTH_BYTES].view(torch.int64)[0])
        message = first[_LENGTH_BYTES:]
        if length == usual:
            return message
        limit = _native.max_encoded_bytes(self._codec, *shape)
        if not usual < length <= limit:
            raise ValueError(
                f"rank {source} of the group sends {length} bytes, but rows of shape "
                f"{tuple(shape)} take {usual} to {limit}: reduce the same shapes with the same "
                "codec on all ranks"
            )
        rest = torch.empty(length - usual, dtype=torch.uint8)
        self._fetch(rest, source)
        return torch.cat([message, rest])

    def flush(self) -> None:
        """Waits until everything is sent."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def _usual_bytes(self, shape: torch.Size) -> int:
        return _native.usual_encoded_bytes(self._codec, *shape)

    def _post(self, data: torch.Tensor, to: int) -> None:
        work = dist.isend(data, group=self._group, group_dst=to)
        assert work is not None
        self._sending.append((work, data))

    def _fetch(self, data: torch.Tensor, source: int) -> None:
        work = dist.irecv(data, group=self._group, group_src=source)
        assert work is not None
        work.wait()


def _split(tensor: torch.Tensor | None, parts: int) -> list[torch.Tensor | None]:
    return [None] * parts if tensor is None else list(tensor.tensor_split(parts))


def _ring(ranks: _Ranks, rows: torch.Tensor, error: torch.Tensor | None) -> None:
    size, rank = ranks.size, ranks.rank
    left, right = (rank - 1) % size, (rank + 1) % size
    parts = rows.tensor_split(size)
    errors = _split(error, size)
    if size == 1:
        return
    k = right
    message = ranks.encode(parts[k])
    for step in range(size - 1):
        ranks.send(message, parts[k].shape, right)
        k = (rank - step) % size
        total = ranks.decode(ranks.receive(parts[k].shape, left), torch.empty_like(parts[k]))
        parts[k].add_(total)
        message = ranks.quantize(parts[k], errors[k])
    # Each rank has the sum of one part now.
    for _ in range(size - 1):
        ranks.send(message, parts[k].shape, right)
        k = (k - 1) % size
        message = ranks.receive(parts[k].shape, left)
        ranks.decode(message, parts[k])
    ranks.flush()


def _recursive_doubling(
    ranks: _Ranks, rows: torch.Tensor, error: torch.Tensor | None, group_size: int
) -> None:
    if ranks.size == 1:
        return
    member = ranks.rank % group_size
    first = ranks.rank - member
    others = [other for other in range(group_size) if other != member]
    parts = rows.tensor_split(group_size)
    for other in others:
        ranks.send(ranks.encode(parts[other]), parts[other].shape, first + other)
    own = parts[member]
    for other in others:
        own.add_(ranks.decode(ranks.receive(own.shape, first + other), torch.empty_like(own)))
    messages = _reduce_pairs(ranks, own, _split(error, group_size)[member], group_size)
    for other in others:
        _send_all(ranks, messages, own, first + other)
    for other in others:
        _receive_all(ranks, len(messages), parts[other], first + other)
    ranks.flush()


def _reduce_pairs(
    ranks: _Ranks, rows: torch.Tensor, error: torch.Tensor | None, group_size: int
) -> list[torch.Tensor]:
    """Sums `rows` in place over the ranks with the same place in all groups. Returns their
    messages."""
    groups, position = ranks.size // group_size, ranks.rank // group_size
    if groups == 1:
        return [ranks.quantize(rows, None)]
    rank_at = [(ranks.rank + (other - position) * group_size) for other in range(groups)]
    halves, errors = rows.tensor_split(2), _split(error, 2)
    messages: list[torch.Tensor] = []
    # Ranks that go on after a level have ones in the lowest bits of their position.
    levels = range(groups.bit_length() - 1)
    level = 0
    for level in levels:
        bit = 1 << level
        partner = rank_at[position ^ bit]
        own = int(bool(position & bit))
        ranks.send(ranks.encode(halves[1 - own]), halves[1 - own].shape, partner)
        half = halves[own]
        half.add_(ranks.decode(ranks.receive(half.shape, partner), torch.empty_like(half)))
        message = ranks.quantize(half, errors[own])
        if own == 0:
            ranks.send(message, half.shape, partner)
            break
        other = ranks.receive(halves[0].shape, partner)
        ranks.decode(other, halves[0])
        messages = [other, message]
    # The last one tells the others, on the way back.
    if position != groups - 1:
        messages = _receive_all(ranks, 2, rows, rank_at[position | 1 << level])
        level -= 1
    for bit in (1 << lower for lower in range(level, -1, -1)):
        _send_all(ranks, messages, rows, rank_at[position ^ bit])
    return messages


def _send_all(ranks: _Ranks, messages: list[torch.Tensor], rows: torch.Tensor, to: int) -> None:
    for message, part in zip(messages, rows.tensor_split(len(messages)), strict=True):
        ranks.send(message, part.shape, to)


def _receive_all(ranks: _Ranks, count: int, rows: torch.Tensor, source: int) -> list[torch.Tensor]:
    messages = []
    for part in rows.tensor_split(count):
        messages.append(ranks.receive(part.shape, source))
        ranks.decode(messages[-1], part)
    return messages

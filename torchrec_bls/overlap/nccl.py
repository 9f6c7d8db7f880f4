"""NCCL's part of a plan. Its modes are numbers of channels, and each channel is a CTA."""

from collections.abc import Sequence

from torchrec_bls.overlap.hook import PlannedBucket
from torchrec_bls.sharding.costs.contention import Mode

_HEADER = (
    "# collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,"
    "regBuff"
)


def options(buckets: Sequence[PlannedBucket], modes: Sequence[Mode]) -> dict[str, int]:
    """Returns limits for a process group's only communicator: those of its widest bucket."""
    channels = _channels(modes)
    used = [channels[bucket.mode] for bucket in buckets]
    return {"min_ctas": min(used), "max_ctas": max(used)}


def tuner_csv(buckets: Sequence[PlannedBucket], modes: Sequence[Mode], ranks: int) -> str:
    """Returns a line for each size of bucket, all-reduces by ring on any number of nodes."""
    channels = _channels(modes)
    by_size: dict[int, int] = {}
    for bucket in buckets:
        wanted = channels[bucket.mode]
        if by_size.setdefault(bucket.bytes, wanted) != wanted:
            raise ValueError(
                f"two buckets of {bucket.bytes} bytes have {by_size[bucket.bytes]} and {wanted} "
                "channels, but the tuner tells them by their size: use nccl_options"
            )
    lines = [
        f"allreduce,{size},{size},ring,simple,{wanted},-1,{ranks},-1,-1"
        for size, wanted in sorted(by_size.items())
    ]
    return "\n".join([_HEADER, *lines]) + "\n"


def _channels(modes: Sequence[Mode]) -> dict[str, int]:
    found = {mode.name: mode.channels for mode in modes if mode.channels is not None}
    if len(found) < len(modes):
        others = [mode.name for mode in modes if mode.channels is None]
        raise ValueError(f"modes {others} are not NCCL's: plan with a profile of backend nccl")
    return found

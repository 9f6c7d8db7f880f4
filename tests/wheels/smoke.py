"""Two ranks use the backend and a channel, with torch alone: `torchrun --nproc-per-node 2`."""

import re
from pathlib import Path

import torch
import torch.distributed as dist

import torchrec_bls
from torchrec_bls import BoundedLagChannel, _native
from torchrec_bls.errors import PeerClosedError

WANTED = {"avx2": {"avx2"}, "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}}


def main() -> None:
    """Raises if an exchange or an error is not as it should be."""
    dist.init_process_group("cpu:bls")
    rank = dist.get_rank()
    out = torch.empty(2, dtype=torch.int64)
    dist.all_to_all_single(out, torch.tensor([10 * rank, 10 * rank + 1]))
    assert out.tolist() == [rank, 10 + rank], out
    channel = BoundedLagChannel(dist.group.WORLD, bound=1, slot_bytes=4096, name="own", deadline=60)
    channel.post([[torch.full((3,), rank)]] * 2)
    with channel.wait() as arrival:
        assert arrival.tensor(1 - rank, dtype=torch.int64).tolist() == [1 - rank] * 3
    dist.barrier()
    # An exception from the depths of C++ becomes that of Python.
    if rank == 0:
        channel.close()
    else:
        channel.post([[torch.full((3,), rank)]] * 2)
        try:
            channel.wait()
        except PeerClosedError as error:
            print(f"{type(error).__name__}: {error}")
        else:
            raise AssertionError("no error")
        channel.close()
        flags = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text()))
        wanted = [name for name, needs in WANTED.items() if needs <= flags]
        assert _native.instruction_sets() == ["portable", *wanted], _native.instruction_sets()
        print(f"{torchrec_bls.__file__}: {_native.instruction_sets()}, verbs {_native.WITH_VERBS}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

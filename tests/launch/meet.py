"""A rank that meets the others over gloo, and then exchanges messages with them."""

import os
import socket
import warnings

import torch
import torch.distributed as dist

from torchrec_bls import BoundedLagChannel

dist.init_process_group("gloo")
assert dist.group.WORLD is not None
rank = dist.get_rank()
total = torch.tensor([rank + 1])
dist.all_reduce(total)
print(f"rank {rank} on {socket.gethostname()}: sum {int(total)}, store {os.environ['MASTER_ADDR']}")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("default")
    channel = BoundedLagChannel(dist.group.WORLD, bound=1, slot_bytes=4096, deadline=60.0)
for warning in caught:
    print(f"rank {rank}: warned: {warning.message}")
warnings.simplefilter("ignore")  # of the messages that are larger than a slot
with channel:
    sums = []
    for items in (3, 3000):
        channel.post([[torch.full((items,), rank + 1)]] * channel.world_size)
    for _ in range(2):
        with channel.wait() as arrival:
            parts = [
                arrival.tensor(source, 0, torch.int64) for source in range(dist.get_world_size())
            ]
            sums.append(int(sum(part.sum() for part in parts)))
    print(f"rank {rank}: received {sums}")
dist.barrier()  # the host of the store stays until all have read it
dist.destroy_process_group()

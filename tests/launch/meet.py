"""A rank that meets the others over gloo, and then asks for a channel with them."""

import os
import socket

import torch
import torch.distributed as dist

from torchrec_bls import BoundedLagChannel
from torchrec_bls.errors import RendezvousError

dist.init_process_group("gloo")
assert dist.group.WORLD is not None
rank = dist.get_rank()
total = torch.tensor([rank + 1])
dist.all_reduce(total)
print(f"rank {rank} on {socket.gethostname()}: sum {int(total)}, store {os.environ['MASTER_ADDR']}")
try:
    with BoundedLagChannel(dist.group.WORLD, slot_bytes=256, deadline=30.0):
        print(f"rank {rank}: joined")
except RendezvousError as error:
    print(f"rank {rank}: RendezvousError: {error}")
dist.barrier()  # the host of the store stays until all have read it
dist.destroy_process_group()

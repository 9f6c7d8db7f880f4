"""A rank on each of two hosts, the cable between which is cut, or one of which vanishes.

    python tests/launch/two_hosts.py python -m tests.faults.hosts FAULT FOLDER

has the ranks exchange messages over TCP. Then the second host does one of these: "cut" pulls its
cable; "vanish" loses its address, and its rank ends: the other host hears no end of a connection,
and gets no answer. Each rank that lives on prints as JSON what its channels say of its peer.
FOLDER has what the two hosts tell each other.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.faults.row import LARGE
from torchrec_bls import BoundedLagChannel
from torchrec_bls.errors import BLSError

DEADLINE = 2.0  # seconds, of the channels
# A rank that computes for so long comes back when its peer is lost.
COMPUTING = 3 * DEADLINE
# What a rank does when it strikes, with a channel for each: it waits; it computes, and all it has
# sent is answered; it computes, and has sent what nobody answers.
SITUATIONS = ("waiting", "idle", "sending")
FAULTS = {"cut": "ip link set cable down", "vanish": "ip address flush dev cable"}


def main(fault: str, folder: Path) -> None:
    """Runs the rank of a host."""
    rank = int(socket.gethostname().removeprefix("host"))
    os.environ["GLOO_SOCKET_IFNAME"] = "cable"
    warnings.simplefilter("ignore")  # a message above a slot is intended
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    living = [0, 1] if fault == "cut" else [0]
    channels = {
        each: {situation: _channel(f"{situation} {each}") for situation in SITUATIONS}
        for each in living
    }
    own = channels.get(rank, {})
    for situation, channel in own.items():
        if situation != "sending":
            channel.post([[torch.ones(1)]] * 2)  # the peer posts nothing more
    dist.barrier()
    time.sleep(0.2)  # the last answers: kernels take 0.04 s
    told: dict[str, dict[str, Any]] = {}
    if own:
        waiting = threading.Thread(target=_wait, args=(own, "waiting", told, folder / "struck"))
        waiting.start()
    if rank == 1:
        time.sleep(0.2)  # so that the other one waits
        subprocess.run(FAULTS[fault].split(), check=True)
        (folder / "struck.tmp").write_text(repr(time.monotonic()))
        (folder / "struck.tmp").rename(folder / "struck")
        if fault == "vanish":
            os._exit(0)
    while not (folder / "struck").exists():
        time.sleep(0.005)
    own["sending"].post([[torch.ones(LARGE)]] * 2)
    time.sleep(COMPUTING)
    for situation in ("idle", "sending"):
        _wait(own, situation, told, folder / "struck")
    waiting.join()
    print(json.dumps(told))


def _channel(name: str) -> BoundedLagChannel:
    """Returns a channel by which both ranks have sent and received something."""
    assert dist.group.WORLD is not None
    channel = BoundedLagChannel(
        dist.group.WORLD, bound=1, slot_bytes=4096, name=name, deadline=DEADLINE, transport="tcp"
    )
    channel.post([[torch.ones(1)]] * 2)
    channel.wait().release()
    return channel


def _wait(
    channels: dict[str, BoundedLagChannel],
    situation: str,
    told: dict[str, dict[str, Any]],
    struck: Path,
) -> None:
    """Notes the error of a wait, and the seconds from the fault to it."""
    try:
        channels[situation].wait()
    except BLSError as error:
        told[situation] = {
            "error": type(error).__name__,
            "message": str(error),
            "seconds": time.monotonic() - float(struck.read_text()),
        }
    channels[situation].close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

"""One of the two processes of the self-test: `python -m ... TRANSPORT RANK FOLDER SECONDS`.

The other one runs the same. They meet through a file in FOLDER and exchange messages of many sizes,
also larger than a slot. The program prints nothing if all messages arrived as sent. Otherwise it
prints what failed, and exits with 1.
"""

import os
import signal
import sys
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from torchrec_bls import BoundedLagChannel
from torchrec_bls.doctor.selftest import imported_file

BOUND = 1
SLOT_BYTES = 4096
ROUNDS = 64

# Seconds, once a peer is there; before that it may still be importing torch.
_PATIENCE = 30.0


def message_bytes(sequence: int) -> int:
    """Returns the size of a message: from nothing to four slots."""
    return sequence * sequence * 4 * SLOT_BYTES // (ROUNDS - 1) ** 2


def message(source: int, sequence: int) -> torch.Tensor:
    """Returns the message of a rank, different for each rank and sequence number."""
    numbers = torch.arange(message_bytes(sequence), dtype=torch.int64)
    return (numbers * 31 + sequence * 7 + source).to(torch.uint8)


def exchange(transport: str, rank: int) -> None:
    """Exchanges all messages with the other rank, up to BOUND iterations apart.

    Raises:
        ValueError: a message arrived changed.
    """
    assert dist.group.WORLD is not None
    with BoundedLagChannel(
        dist.group.WORLD,
        bound=BOUND,
        slot_bytes=SLOT_BYTES,
        name="self-test",
        deadline=_PATIENCE,
        transport=transport,
    ) as channel:
        for step in range(ROUNDS + BOUND):
            if step < ROUNDS:
                channel.post([[message(rank, step)]] * 2)
            if step >= BOUND:
                with channel.wait() as arrival:
                    for source in range(2):
                        if not arrival.tensor(source).equal(message(source, arrival.sequence)):
                            raise ValueError(
                                f"message {arrival.sequence} of rank {source} arrived at rank "
                                f"{rank} with other bytes than were sent"
                            )


def meet(rank: int, folder: Path, seconds: float) -> None:
    """Joins the two processes over gloo. It is not tested, and takes the loopback interface."""
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=seconds),
    )
    os.environ["GLOO_SOCKET_IFNAME"] = chosen  # TCP takes it as a job's ranks would


def main() -> int:
    """Runs this process's part and returns its exit status."""
    transport, rank, folder, seconds = sys.argv[1:]
    imported_file(Path(folder), int(rank)).touch()
    signal.alarm(int(float(seconds)) + 5)  # ends this process even if the doctor is killed
    warnings.simplefilter("ignore")  # messages above a slot are intended
    try:
        meet(int(rank), Path(folder), float(seconds))
        exchange(transport, int(rank))
    except (RuntimeError, ValueError, OSError) as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The program of the GPUs' self-test: `python -m torchrec_bls.doctor.gpu_reads SECONDS`.

Each GPU that this process sees reads rows of a sealed segment, as tables are. The program prints
nothing if all rows came as they lie. Otherwise it prints what failed, and exits with 1.
"""

import signal
import sys

import torch

from torchrec_bls import _native
from torchrec_bls.direct.gpu.device import Gpu, gpu_of
from torchrec_bls.direct.gpu.reader import GpuReader
from torchrec_bls.direct.gpu.registered_tables import RegisteredTables
from torchrec_bls.direct.gpu.strips import Strip
from torchrec_bls.errors import BLSError

_ROWS, _COLUMNS = 4096, 64


def read_rows(gpu: Gpu) -> None:
    """Registers a segment with a GPU, and reads each of its rows.

    Raises:
        RegistrationError: the driver does not register it.
        ValueError: a row came with other bytes.
    """
    table = torch.arange(_ROWS * _COLUMNS, dtype=torch.float32).view(_ROWS, _COLUMNS)
    first: int = _native.FIRST_TABLE_OFFSET
    size = table.numel() * table.itemsize
    segment = _native.TableSegment.create(
        (0, "self-test", bytes(32)), [(table, first)], first + size, False
    )
    tables = RegisteredTables(gpu, [(segment, first, size)])
    strip = Strip(0, 0, _COLUMNS, _COLUMNS * table.itemsize, _ROWS, _ROWS, False, [0])
    reader = GpuReader(gpu, tables, [[strip]], 32)
    ids = torch.arange(_ROWS - 1, -1, -1)
    # No number of the table: memory that an earlier try has left would have them all.
    out = torch.full_like(table, -1.0, device=gpu.device)
    begins = gpu.copy_of(torch.tensor([0, _ROWS]))
    bad = reader.copy_rows(tables, gpu.copy_of(ids), begins, out).bad_id()
    if bad is not None or not torch.equal(out.cpu(), table[ids]):
        raise ValueError(f"{gpu.device} read rows of host memory with other bytes than they have")
    tables.registration.close()


def main() -> int:
    """Tries each GPU and returns the exit status."""
    signal.alarm(int(float(sys.argv[1])) + 5)  # ends this process even if the doctor is killed
    try:
        gpu_of(torch.device("cuda"))  # says what is missing
        for number in range(torch.cuda.device_count()):
            read_rows(gpu_of(torch.device("cuda", number)))
    except (BLSError, RuntimeError, ValueError, OSError) as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Names of processes, as `ps` and `top` show them."""

from contextlib import suppress
from pathlib import Path

# Characters that the kernel keeps.
_MOST = 15


def name_process(name: str) -> None:
    """Names this process.

    Args:
        name: what it is.
    """
    with suppress(OSError):  # a container without /proc
        Path("/proc/self/comm").write_text(f"bls {name}"[:_MOST])

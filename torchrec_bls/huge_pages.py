"""Pages of 2 MiB for the tables that the processes of a host read."""

from typing import Literal, TypeAlias

#: What a module's segments ask for: small pages, transparent ones of 2 MiB where the kernel has
#: some, or those of the host's pool.
HugePages: TypeAlias = bool | Literal["hugetlb"]

#: What to change where ranks ask for different pages.
SAME_PAGES = "Give all ranks the same BLSConfig(huge_pages=...)"

# Small tables gain little: the processor remembers their pages anyway.
_FROM_BYTES = 1 << 30


def huge_pages_for(asked: HugePages | None, table_bytes: int) -> HugePages:
    """Returns what the segments of a module ask for, the same in all processes.

    Args:
        asked: see BLSConfig; None: pages of 2 MiB for tables of 1 GiB or more.
        table_bytes: bytes of the module's tables, on all ranks together.
    """
    return table_bytes >= _FROM_BYTES if asked is None else asked

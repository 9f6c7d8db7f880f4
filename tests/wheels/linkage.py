"""What a compiled module wants of other libraries, read from its ELF tables.

`torch-abi-audit` looks for names of torch, needs Python 3.11 and is young. An allow-list says more:
a symbol is one of Python's C API, or has a version, as those of glibc and libstdc++ have and
torch's have not.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from elftools.elf.elffile import ELFFile

ALLOWED_LIBRARIES = {
    "ld-linux-aarch64.so.1",
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
    "libstdc++.so.6",
}
# Weak: the linker or a profiler defines them, or nobody does.
HOOKS = {"__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable"}

INIT = "PyInit__native"


@dataclass(frozen=True)
class Linkage:
    """A shared object's links.

    Attributes:
        libraries: what the loader loads with it.
        unversioned: undefined symbols that may come from any library.
        versions: those of other symbols, such as `GLIBC_2.28`.
        exported: symbols that other objects see.
    """

    libraries: frozenset[str]
    unversioned: frozenset[str]
    versions: frozenset[str]
    exported: frozenset[str]

    def faults(self) -> list[str]:
        """Returns what a module that travels must not have, a sentence each."""
        foreign = {name for name in self.unversioned - HOOKS if not name.startswith(("Py", "_Py"))}
        return [
            *(f"needs {name}" for name in sorted(self.libraries - ALLOWED_LIBRARIES)),
            *(f"wants {name} of no known library" for name in sorted(foreign)),
            *(f"exports {name}" for name in sorted(self.exported - {INIT})),
        ]


def read_linkage(path: Path) -> Linkage:
    """Reads the dynamic tables of a shared object."""
    with path.open("rb") as file:
        elf = ELFFile(file)
        dynamic = elf.get_section_by_name(".dynamic")
        libraries = [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]
        indices = elf.get_section_by_name(".gnu.version")
        wanted = elf.get_section_by_name(".gnu.version_r")
        versions = [aux.name for _, auxes in wanted.iter_versions() for aux in auxes]
        unversioned, exported = set(), set()
        for number, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
            # Local and global stand for no version; others are numbers.
            has_version = isinstance(indices.get_symbol(number)["ndx"], int)
            if symbol["st_shndx"] == "SHN_UNDEF":
                if symbol.name and not has_version:
                    unversioned.add(symbol.name)
            elif symbol["st_info"]["bind"] != "STB_LOCAL":
                exported.add(symbol.name)
    return Linkage(
        frozenset(libraries), frozenset(unversioned), frozenset(versions), frozenset(exported)
    )

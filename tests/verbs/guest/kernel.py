"""Debian's kernel and the modules that Soft-RoCE needs, unpacked into a cache and not installed."""

import lzma
import os
import re
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Depends on the package of the kernel that Debian has at the moment.
METAPACKAGE = "linux-image-amd64"
# What the guest loads; modprobe knows what these need.
MODULES = (
    *("virtio_pci", "9pnet_virtio", "9p", "overlay"),
    *("crc32_generic", "crc32c_generic", "rdma_rxe", "ib_uverbs", "veth"),
)
_XZ_MAGIC = b"\xfd7zXZ\0"
_ELF_MAGIC = b"\x7fELF"
# Real mode code and headers, in which the magic numbers mean nothing.
_SETUP_BYTES = 16 << 10
_DOWNLOAD_SECONDS = 600


@dataclass(frozen=True)
class Kernel:
    """What the guest boots.

    Attributes:
        image: for qemu's -kernel.
        modules: in the order in which they can be loaded.
    """

    image: Path
    modules: tuple[Path, ...]


def cached_kernel() -> Kernel:
    """Returns the newest kernel of the cache, for which Debian's current one is downloaded if the
    cache has none.

    Raises:
        RuntimeError: apt knows no kernel, or did not get it.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(base) / "torchrec-bls" / "kernels"
    cache.mkdir(parents=True, exist_ok=True)
    # Kernels with other modules are of no use.
    suffix = f"-{zlib.crc32(repr(MODULES).encode()):08x}"
    if not any(cache.glob(f"*{suffix}/image")):
        print(f"Downloading Debian's kernel; what the guest needs of it is kept in {cache}")
        with tempfile.TemporaryDirectory(dir=cache, prefix=".new-") as work:
            version, archive = _download(Path(work))
            # Renamed once it is complete, so that nobody finds half a kernel.
            unpacked = Path(work) / "kernel"
            _unpack(version, archive, Path(work), unpacked)
            with suppress(FileExistsError):
                unpacked.rename(cache / f"{version}{suffix}")
    newest = max(cache.glob(f"*{suffix}/image"), key=lambda image: image.stat().st_mtime).parent
    return Kernel(newest / "image", tuple(sorted((newest / "modules").iterdir())))


def _download(folder: Path) -> tuple[str, Path]:
    """Returns the version of Debian's current kernel and its package."""
    if os.geteuid() == 0:
        # Debian removes old kernels; a list of packages of last month names one that is gone.
        _output("apt-get", "update", "--quiet")
    package = package_of(_output("apt-cache", "depends", METAPACKAGE))
    # apt drops its rights for the download where it can, and then needs a folder open to all.
    folder.chmod(0o755)
    _output("apt-get", "download", package, cwd=folder)
    (archive,) = folder.glob("*.deb")
    return package.removeprefix("linux-image-"), archive


def _unpack(version: str, archive: Path, work: Path, kernel: Path) -> None:
    """Leaves in `kernel` what the guest needs of the package."""
    tree = work / "tree"
    _output("dpkg-deb", "--extract", str(archive), str(tree))
    # With a merged /usr modprobe wants to find the modules there.
    if not (tree / "lib").exists():
        (tree / "lib").symlink_to("usr/lib")
    _output("depmod", "-b", str(tree), version)
    (kernel / "modules").mkdir(parents=True)
    for number, module in enumerate(load_order(_dependencies(tree, version))):
        content = module.read_bytes()
        name = f"{number:02}-{module.name.removesuffix('.xz')}"
        (kernel / "modules" / name).write_bytes(
            lzma.decompress(content) if module.suffix == ".xz" else content
        )
    # Last: its presence says that the kernel is complete.
    (kernel / "image").write_bytes(elf_of((tree / "boot" / f"vmlinuz-{version}").read_bytes()))


def package_of(depends: str) -> str:
    """Returns the kernel's package from what `apt-cache depends` printed for the metapackage."""
    found = re.search(r"^\s*Depends: (linux-image-\d\S+)$", depends, re.MULTILINE)
    if found is None:
        raise RuntimeError(
            f"apt knows no {METAPACKAGE}, about which apt-cache printed {depends!r}: "
            "run apt-get update, or put Debian's archive into apt's sources"
        )
    return found[1]


def load_order(dependencies: Iterable[str]) -> list[Path]:
    """Returns the modules' files from what `modprobe --show-depends` printed for each of them."""
    lines = [line.split() for output in dependencies for line in output.splitlines()]
    # Others are "builtin", and insmod's line may go on with parameters.
    return list(dict.fromkeys(Path(line[1]) for line in lines if line[:1] == ["insmod"]))


def elf_of(image: bytes) -> bytes:
    """Returns the uncompressed kernel in a bzImage, which spares the guest the work of minutes to
    unpack it, or the image itself if xz did not compress it."""
    start = image.find(_XZ_MAGIC, _SETUP_BYTES)
    if start < 0:
        return image
    elf = lzma.LZMADecompressor().decompress(image[start:])
    if not elf.startswith(_ELF_MAGIC):
        raise RuntimeError(f"the kernel's xz stream holds {elf[:4]!r}... and no ELF file")
    return elf


def _dependencies(tree: Path, version: str) -> Iterable[str]:
    for module in MODULES:
        yield _output("modprobe", "-d", str(tree), "-S", version, "--show-depends", module)


def _output(*command: str, cwd: Path | None = None) -> str:
    # A user's path often lacks where depmod and modprobe are.
    program = shutil.which(command[0], path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    done = subprocess.run(
        [program or command[0], *command[1:]],
        cwd=cwd,
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        timeout=_DOWNLOAD_SECONDS,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr or done.stdout}")
    return done.stdout

"""A machine in software, with the host's files and two Soft-RoCE devices, that runs one command."""

import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.verbs.guest.kernel import Kernel, cached_kernel

_HERE = Path(__file__).parent
# Plain qemu: stock kernels do not boot on every /dev/kvm, and the guest is the same everywhere.
_MACHINE = shlex.split(
    "-machine q35 -accel tcg,thread=multi -cpu max -smp 2 -nodefaults -no-user-config "
    "-display none -no-reboot"
)
_KERNEL_ARGUMENTS = (
    "console=ttyS0 quiet panic=-1 mitigations=off nokaslr tsc=reliable random.trust_cpu=on"
)


def run_in_guest(command: str, out: Path, deadline: float, memory_mib: int = 4096) -> int:
    """Boots a guest, runs a command in it and returns the command's exit status.

    The guest sees the files of this machine under the same paths; what it writes stays in its
    memory, except in `out`. What the command prints is printed.

    Args:
        command: of bash, run as root in the guest's root folder.
        out: folder that the command may write to; the kernel's messages are left there too.
        deadline: seconds until the guest is ended, if the command is not done by then.
        memory_mib: of the guest, in MiB.

    Raises:
        RuntimeError: the guest ended without the command's exit status, or was ended.
    """
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    status, console = out / "guest.status", out / "guest.console"
    status.unlink(missing_ok=True)
    kernel = cached_kernel()
    with tempfile.TemporaryDirectory(prefix="bls-guest-") as folder:
        initrd = _initrd(Path(folder), kernel, command, out)
        qemu = [
            # Without us it would run for ever.
            *("setpriv", "--pdeathsig", "KILL", "qemu-system-x86_64", *_MACHINE),
            *("-m", str(memory_mib), "-kernel", str(kernel.image), "-initrd", str(initrd)),
            *("-append", _KERNEL_ARGUMENTS),
            *("-serial", f"file:{console}", "-serial", "stdio"),
            *_shared_folder("host", Path("/"), ",readonly=on,multidevs=remap"),
            *_shared_folder("out", out, ""),
        ]
        try:
            subprocess.run(qemu, stdin=subprocess.DEVNULL, timeout=deadline, check=True)
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"the guest was ended after {deadline:g} s{_tail(console)}"
            ) from None
        except subprocess.CalledProcessError as error:
            raise RuntimeError(f"qemu failed with status {error.returncode}") from None
    if not status.exists():
        raise RuntimeError(f"the guest did not run the command to its end{_tail(console)}")
    return int(status.read_text())


def _initrd(folder: Path, kernel: Kernel, command: str, out: Path) -> Path:
    """Packs what the guest needs before it sees this machine's files, and its command."""
    root = folder / "root"
    for part in ("bin", "modules", "job"):
        (root / part).mkdir(parents=True)
    busybox = shutil.which("busybox")
    if busybox is None:
        raise RuntimeError(
            "busybox: not found. Install it with: sudo apt-get install busybox-static"
        )
    shutil.copy(busybox, root / "bin" / "busybox")
    shutil.copy(_HERE / "init.sh", root / "init")
    (root / "init").chmod(0o755)
    for module in kernel.modules:
        shutil.copy(module, root / "modules")
    shutil.copy(_HERE / "start.sh", root / "job")
    (root / "job" / "settings").write_text(f"OUT={shlex.quote(str(out))}\n")
    (root / "job" / "command").write_text(command)
    names = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
    initrd = folder / "initrd.cpio"
    with initrd.open("wb") as archive:
        subprocess.run(
            ["cpio", "--create", "--format=newc", "--quiet"],
            input=names.encode(),
            stdout=archive,
            cwd=root,
            check=True,
        )
    return initrd


def _shared_folder(tag: str, path: Path, options: str) -> list[str]:
    # A comma ends a value for qemu; two are one.
    escaped = str(path).replace(",", ",,")
    return [
        *("-fsdev", f"local,id={tag},path={escaped},security_model=none{options}"),
        *("-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"),
    ]


def _tail(console: Path) -> str:
    if not console.exists():
        return ""
    lines = console.read_text(errors="replace").splitlines()[-20:]
    return "; its console ends with:\n" + "\n".join(lines)

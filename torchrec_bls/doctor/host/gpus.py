"""NVIDIA's GPUs, which may read the tables of a host. Looking at them needs no library."""

from dataclasses import dataclass
from pathlib import Path

from torchrec_bls.doctor.finding import Finding, Status
from torchrec_bls.doctor.host.sysfs import read

_NVIDIA = "0x10de"
# Classes of PCI devices: displays, and those that have none.
_CLASSES = ("0x0300", "0x0302")


@dataclass(frozen=True)
class Gpu:
    """A GPU on the host's PCI bus.

    Attributes:
        bus: its address there, as "0000:3b:00.0".
        model: its name, by the driver; empty without one.
        numa_node: NUMA node of the device; None where that is unknown.
        width: lanes of its link; None where /sys does not tell.
        most_width: lanes that it could have.
        speed: speed of a lane at the moment, in the kernel's words. An idle GPU lowers it.
    """

    bus: str
    model: str
    numa_node: int | None
    width: int | None
    most_width: int | None
    speed: str


def find_gpus(root: Path) -> list[Gpu]:
    """Returns the GPUs of a host, by their addresses.

    Args:
        root: root of the file system, for /sys and /proc.
    """
    try:
        folders = sorted((root / "sys/bus/pci/devices").iterdir())
    except OSError:
        return []
    return [
        _gpu(root, folder)
        for folder in folders
        if read(folder / "vendor") == _NVIDIA
        and (read(folder / "class") or "").startswith(_CLASSES)
    ]


def gpus_findings(root: Path) -> list[Finding]:
    """Says what GPUs there are, with their driver and links; nothing where there is none."""
    gpus = find_gpus(root)
    if not gpus:
        return []
    driver = _driver(root)
    facts = {
        "driver": driver,
        "gpus": [
            {
                "bus": gpu.bus,
                "model": gpu.model,
                "numa_node": gpu.numa_node,
                "link_lanes": gpu.width,
                "most_link_lanes": gpu.most_width,
                "link_speed": gpu.speed,
            }
            for gpu in gpus
        ],
    }
    text = ", ".join(_described(gpu) for gpu in gpus)
    if driver is None:
        return [
            Finding(
                "GPUs",
                Status.WARNING,
                f"{text}, but the kernel has no driver of NVIDIA's: only CPUs look rows up",
                "Install NVIDIA's driver, or give a container the GPUs (docker run --gpus all). "
                "Nothing else needs it",
                facts,
            )
        ]
    narrow = [gpu for gpu in gpus if gpu.width and gpu.most_width and gpu.width < gpu.most_width]
    if narrow:
        lanes = ", ".join(f"{gpu.width} of {gpu.most_width} at {gpu.bus}" for gpu in narrow)
        return [
            Finding(
                "GPUs",
                Status.WARNING,
                f"{text}; driver {driver}. Links have fewer lanes than they could: {lanes}. Reads "
                "of tables in host memory are slower by as much",
                "Seat the card in a slot with as many lanes, and look at the firmware's settings "
                "of the slot",
                facts,
            )
        ]
    return [Finding("GPUs", Status.OK, f"{text}; driver {driver}", facts=facts)]


def _gpu(root: Path, folder: Path) -> Gpu:
    information = read(root / "proc/driver/nvidia/gpus" / folder.name / "information") or ""
    models = [line.partition(":") for line in information.splitlines()]
    node = read(folder / "numa_node")
    return Gpu(
        bus=folder.name,
        model=next((value.strip() for name, _, value in models if name == "Model"), ""),
        numa_node=int(node) if node is not None and node.isdecimal() else None,
        width=_lanes(folder / "current_link_width"),
        most_width=_lanes(folder / "max_link_width"),
        speed=read(folder / "current_link_speed") or "",
    )


def _described(gpu: Gpu) -> str:
    link = f", x{gpu.width} at {gpu.speed}" if gpu.width else ""
    node = "" if gpu.numa_node is None else f", NUMA node {gpu.numa_node}"
    return f"{gpu.model or 'a GPU'} at {gpu.bus}{link}{node}"


def _driver(root: Path) -> str | None:
    """Returns the version of NVIDIA's driver: that of the kernel's module."""
    text = read(root / "proc/driver/nvidia/version") or ""
    return next((word for word in text.split() if _is_version(word)), None)


def _is_version(word: str) -> bool:
    parts = word.split(".")
    return len(parts) > 1 and all(part.isdecimal() for part in parts)


def _lanes(path: Path) -> int | None:
    text = read(path) or ""
    return int(text) if text.isdecimal() and int(text) else None

"""`make wheels`: builds, names and tries a wheel for each Python, one after the other."""

from __future__ import annotations

import argparse
import shutil
import time

from .build import ROOT, build_sdist, build_wheel, check_wheel, tag_wheel, unpack
from .install import make_environment, try_wheel


def newest(versions: frozenset[str], kind: str) -> str:
    """Returns the highest of `versions` that begins with `kind`, or a dash."""
    numbers = [name.removeprefix(kind) for name in versions if name.startswith(kind)]
    return max(numbers, key=lambda text: [int(part) for part in text.split(".")], default="-")


def main() -> None:
    """Ends at the first wheel that is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pythons", nargs="+", help="interpreters, 3.10 or later")
    parser.add_argument("--build-only", action="store_true", help="install none of the wheels")
    args = parser.parse_args()
    work, out = ROOT / "build" / "wheels", ROOT / "build" / "dist"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    sdist = build_sdist(out)
    print(f"{sdist.name}: {sdist.stat().st_size >> 10} KiB", flush=True)
    source = unpack(sdist, work / "source")
    for python in args.pythons:
        started = time.monotonic()
        wheel = tag_wheel(build_wheel(python, source, work), out)
        linkage = check_wheel(wheel)
        print(
            f"{wheel.name}: {wheel.stat().st_size >> 10} KiB, needs "
            f"{' '.join(sorted(linkage.libraries))}, glibc {newest(linkage.versions, 'GLIBC_')}, "
            f"libstdc++ {newest(linkage.versions, 'GLIBCXX_')}, built in "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )
        if args.build_only:
            continue
        environment = work / "environment"
        make_environment(python, environment)
        try_wheel(wheel, environment)
        # Outside of an index of CPU builds it has 5 GB.
        shutil.rmtree(environment)
        print(f"{wheel.name}: tried in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()

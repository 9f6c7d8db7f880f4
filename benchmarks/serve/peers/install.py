"""Installs the peers, each into a virtual environment of its own: build/serve-peers/NAME.

torch, TorchRec and this package are those of the environment that runs this program.
"""

import argparse
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from benchmarks import ROOT

ENVIRONMENTS = ROOT / "build" / "serve-peers"
_REQUIREMENTS = Path(__file__).parent / "requirements"
NAMES = sorted(path.stem for path in _REQUIREMENTS.glob("*.txt"))


def interpreter(name: str) -> Path:
    """The Python of a peer's environment."""
    return ENVIRONMENTS / name / "bin" / "python"


def install(name: str) -> None:
    """Installs a peer, or what its environment lacks."""
    if not interpreter(name).exists():
        venv.create(ENVIRONMENTS / name, symlinks=True)
    requirements = str(_REQUIREMENTS / f"{name}.txt")
    pip = [sys.executable, "-m", "pip", "--python", str(interpreter(name)), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--requirement", requirements], check=True)
    (library,) = (ENVIRONMENTS / name / "lib").glob("python*/site-packages")
    # After the peer's own packages. `addsitedir` reads .pth files there, as that of this package.
    shared = sysconfig.get_path("purelib")
    (library / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")


def main() -> None:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(NAMES)}")
    for name in made.parse_args().names or NAMES:
        install(name)
        print(f"{name}: {interpreter(name)}")


if __name__ == "__main__":
    main()

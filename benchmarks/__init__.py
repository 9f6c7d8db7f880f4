"""Benchmarks: see README.md. The DLRMs they run are those of the examples."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "examples"))

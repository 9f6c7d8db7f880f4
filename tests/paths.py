"""Where the checkout lies, and the data sets that some tests need."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"

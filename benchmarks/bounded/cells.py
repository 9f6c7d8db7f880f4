"""The ways of sending embeddings that are compared, and which figures of the paper have them."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.bounded.paper import BOUNDS, classes_by_size
from torchrec_bls.codecs.error_bound import Decay, ErrorBound
from torchrec_bls.codecs.rows import Codec


@dataclass(frozen=True)
class Cell:
    """How the embeddings of a training travel; gradients travel as they are."""

    key: str
    figure: str = ""
    bound: float = 0.0  # of all tables; 0: each has that of its class
    by_eta: bool = False  # whether classes are those of equation 1, else those of the tables' sizes
    start: float = 1.0  # what bounds are multiplied by at first
    kind: str = "stepwise"
    steps: int = 4
    codec: Codec | None = None  # in place of a bound

    def bounds(
        self, rows_per_table: Sequence[int], by_eta: str, iterations: int
    ) -> list[ErrorBound]:
        """The bound of each table in a training; that of a decay is reached in the middle."""
        decay = None
        if self.start > 1:
            decay = Decay(self.start, max(1, iterations // 2), self.steps, self.kind)
        classes = by_eta or classes_by_size(rows_per_table)
        return [ErrorBound(self.bound or BOUNDS[name], decay) for name in classes]


BASELINE = Cell("fp32", codec=Codec.FP32)
CELLS = (
    BASELINE,
    Cell("fp16", "8", codec=Codec.FP16),
    Cell("uint8", "8", codec=Codec.UINT8),
    *(Cell(f"{bound}", "8", bound) for bound in (0.01, 0.02, 0.03, 0.05)),
    Cell("by size", "9"),
    Cell("by eta", "9", by_eta=True),
    *(Cell(f"by size, {start}x stepwise", "5, 10", start=start) for start in (2, 3)),
    *(Cell(f"by size, {start}x dropped", "10", start=start, steps=1) for start in (2, 3)),
    *(Cell(f"by size, 2x {kind}", "5", start=2, kind=kind) for kind in ("linear", "logarithmic")),
)
#: What compressors make of the lookups of a source's training in full precision.
LOOKUPS = Cell("lookups")

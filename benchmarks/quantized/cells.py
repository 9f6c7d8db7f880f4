"""The rows of the paper's tables, with its figures."""

from dataclasses import dataclass, replace

from benchmarks.quantized.dlrm import Collectives
from torchrec_bls.codecs.rows import Codec

NODES = (32, 64, 128)
_CODECS = {2: Codec.UINT2, 4: Codec.UINT4, 8: Codec.UINT8, 32: Codec.FP32}
_ROW_NAMES = {2: "uint{1}, uint{2}", 3: "{0}", 4: "{0}; (f{1}, b{2})"}
# By table: all-reduce, bits of the all-to-all forward and backward; and the changes of the accuracy
# in percent, one for each number of nodes, of which table 2 has one alone.
_PAPER = {
    2: (
        (("", 8, 8), (0.00096,)),
        (("", 8, 4), (-0.00380,)),
        (("", 4, 8), (0.00571,)),
        (("", 4, 4), (-0.00222,)),
        (("", 4, 2), (0.01651,)),
        (("", 2, 4), (-0.05674,)),
        (("", 2, 2), (-0.06339,)),
    ),
    3: (
        (("uint8 ring", 32, 32), (0.00222, -0.01332, -0.01997)),
        (("uint4 ring", 32, 32), (-0.30503, -0.87948, -1.78011)),
        (("uint4 ring EC", 32, 32), (-0.00603, -0.00571, -0.00380)),
        (("uint4 RD", 32, 32), (-0.00031, 0.00191, -0.01585)),
        (("uint2 ring", 32, 32), (-0.93560, -1.37794, -4.91551)),
        (("uint2 ring EC", 32, 32), (-2.92281, -6.32555, -6.32555)),
        (("uint2 RD", 32, 32), (-0.23143, -0.44602, -0.48192)),
        (("uint2 RD EC", 32, 32), (-0.20638, -0.27524, -0.29675)),
    ),
    4: (
        (("uint8 ring", 4, 4), (0.00031, -0.01395, -0.02631)),
        (("uint4 ring EC", 4, 4), (-0.01109, -0.00444, -0.00190)),
        (("uint4 ring EC", 4, 2), (0.01902, -1.58532, -0.01553)),
        (("uint4 RD", 4, 4), (-0.01458, -0.01226, -0.03678)),
        (("uint4 RD EC", 4, 4), (-0.00950, -0.00666, -0.02473)),
        (("uint4 RD EC", 4, 2), (-0.02409, -0.03170, -0.02874)),
    ),
}


@dataclass(frozen=True)
class Cell:
    """One configuration that is trained."""

    table: int  # of the paper; 0 for what it does not have
    row: str  # as the paper names it
    collectives: Collectives
    paper: float | None = None  # the paper's change of accuracy in percent, where it has one

    @property
    def key(self) -> str:
        return f"table {self.table}, {self.row}, {self.collectives.nodes} nodes"


def collectives(nodes: int, all_reduce: str, forward: int = 32, backward: int = 32) -> Collectives:
    """What a row means: the all-reduce as the paper names it, "" for sums as on one node, and the
    bits of the all-to-all."""
    how = Collectives(nodes, _CODECS[forward], _CODECS[backward])
    if not all_reduce:
        return how
    codec, algorithm, *compensated = all_reduce.split()
    algorithm = {"ring": "ring", "RD": "recursive_doubling"}[algorithm]
    codec = Codec[codec.upper()]
    return replace(how, all_reduce=codec, algorithm=algorithm, compensated=bool(compensated))


#: Full precision on one node, which all others are compared with.
BASELINE = Cell(0, "fp32", Collectives())
#: Nothing is quantized, but sums have another order: how far two runs drift apart anyway.
CONTROL = Cell(0, "fp32 ring", collectives(32, "fp32 ring"))
CELLS = (
    BASELINE,
    CONTROL,
    *(
        Cell(table, _ROW_NAMES[table].format(*how), collectives(nodes, *how), change)
        for table, rows in _PAPER.items()
        for how, changes in rows
        for nodes, change in zip((1,) if table == 2 else NODES, changes, strict=True)
    ),
)

"""The rows of the paper's tables, with its figures."""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.quantized.dlrm import Collectives
from torchrec_bls.codecs.rows import Codec

NODES = (32, 64, 128)
# Of the paper's baseline: full precision everywhere.
BASELINE = "fp32"


@dataclass(frozen=True)
class Cell:
    """One configuration that is trained.

    Attributes:
        table: of the paper; 0 for what it does not have.
        row: as the paper names it.
        collectives: what travels how.
        paper: the paper's change of accuracy in percent; None where it has none.
    """

    table: int
    row: str
    collectives: Collectives
    paper: float | None = None

    @property
    def key(self) -> str:
        """Names the cell among all."""
        return f"table {self.table}, {self.row}, {self.collectives.nodes} nodes"


def all_cells() -> list[Cell]:
    """Returns baseline, control and the cells of tables 2, 3 and 4."""
    control = Collectives(nodes=32, all_reduce=Codec.FP32)
    return [
        Cell(0, BASELINE, Collectives()),
        # Nothing is quantized, but sums have another order: how far two runs drift apart anyway.
        Cell(0, "fp32 ring", control),
        *_table_2(),
        *_table_3(),
        *_table_4(),
    ]


def _table_2() -> Iterator[Cell]:
    papers = (0.00096, -0.00380, 0.00571, -0.00222, 0.01651, -0.05674, -0.06339)
    bits = ((8, 8), (8, 4), (4, 8), (4, 4), (4, 2), (2, 4), (2, 2))
    for (forward, backward), paper in zip(bits, papers, strict=True):
        how = Collectives(forward=_codec(forward), backward=_codec(backward))
        yield Cell(2, f"uint{forward}, uint{backward}", how, paper)


def _table_3() -> Iterator[Cell]:
    for row, paper in (
        ("uint8 ring", (0.00222, -0.01332, -0.01997)),
        ("uint4 ring", (-0.30503, -0.87948, -1.78011)),
        ("uint4 ring EC", (-0.00603, -0.00571, -0.00380)),
        ("uint4 RD", (-0.00031, 0.00191, -0.01585)),
        ("uint2 ring", (-0.93560, -1.37794, -4.91551)),
        ("uint2 ring EC", (-2.92281, -6.32555, -6.32555)),
        ("uint2 RD", (-0.23143, -0.44602, -0.48192)),
        ("uint2 RD EC", (-0.20638, -0.27524, -0.29675)),
    ):
        for nodes, change in zip(NODES, paper, strict=True):
            yield Cell(3, row, _collectives(nodes, row), change)


def _table_4() -> Iterator[Cell]:
    for all_reduce, forward, backward, paper in (
        ("uint8 ring", 4, 4, (0.00031, -0.01395, -0.02631)),
        ("uint4 ring EC", 4, 4, (-0.01109, -0.00444, -0.00190)),
        ("uint4 ring EC", 4, 2, (0.01902, -1.58532, -0.01553)),
        ("uint4 RD", 4, 4, (-0.01458, -0.01226, -0.03678)),
        ("uint4 RD EC", 4, 4, (-0.00950, -0.00666, -0.02473)),
        ("uint4 RD EC", 4, 2, (-0.02409, -0.03170, -0.02874)),
    ):
        row = f"{all_reduce}; (f{forward}, b{backward})"
        for nodes, change in zip(NODES, paper, strict=True):
            how = _collectives(nodes, all_reduce, _codec(forward), _codec(backward))
            yield Cell(4, row, how, change)


def _collectives(
    nodes: int, all_reduce: str, forward: Codec = Codec.FP32, backward: Codec = Codec.FP32
) -> Collectives:
    codec, algorithm, *compensation = all_reduce.split()
    return Collectives(
        nodes=nodes,
        forward=forward,
        backward=backward,
        all_reduce=Codec[codec.upper()],
        algorithm={"ring": "ring", "RD": "recursive_doubling"}[algorithm],
        compensated=bool(compensation),
    )


def _codec(bits: int) -> Codec:
    return Codec[f"UINT{bits}"]

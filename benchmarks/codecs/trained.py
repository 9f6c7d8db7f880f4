"""Tables of a trained DLRM, and the ids of a batch as skewed as those it was trained with."""

import importlib.util
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

# Kaggle's: Criteo's display advertising challenge.
CARDINALITIES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992),
    *(5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
_STEPS, _TRAINED_BATCH = 400, 1024


class Lookups:
    """Ids of one batch, and the rows that they have.

    Attributes:
        ids: [tables, samples].
        rows: [tables, samples, columns], equal where ids are.
    """

    def __init__(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        self.ids = ids
        self.rows = rows

    def save(self, path: Path) -> None:
        """Writes both to a file."""
        np.savez(path, ids=self.ids.numpy(), rows=self.rows.numpy())

    @classmethod
    def load(cls, path: Path) -> "Lookups":
        """Reads what `save` wrote."""
        with np.load(path) as file:
            return cls(torch.from_numpy(file["ids"]), torch.from_numpy(file["rows"]))


def random_lookups(samples: int, columns: int, most_rows: int) -> Lookups:
    """Rows that nothing was learned in: normally distributed, of Zipf's ids."""
    generator = torch.Generator().manual_seed(0)
    ids, rows = [], []
    for cardinality in CARDINALITIES:
        count = min(cardinality, most_rows)
        shares = torch.arange(1, count + 1, dtype=torch.float64).pow(-1.1)
        ids.append(torch.multinomial(shares, samples, replacement=True, generator=generator))
        table = 0.1 * torch.randn(count, columns, generator=generator)
        rows.append(table[ids[-1]])
    return Lookups(torch.stack(ids), torch.stack(rows))


def trained_lookups(program: Path, samples: int, columns: int, most_rows: int) -> Lookups:
    """Trains a DLRM by the program that makes the codecs' data, in some minutes."""
    spec = importlib.util.spec_from_file_location("gen_data", program)
    assert spec is not None and spec.loader is not None
    gen_data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gen_data)
    rows = [min(cardinality, most_rows) for cardinality in CARDINALITIES]
    skews = [1.2 if count > 5000 else 1.05 for count in rows]
    how = (skews, [1] * len(rows), "adagrad", 0.03, _STEPS, _TRAINED_BATCH, [(samples, 1)])
    with TemporaryDirectory() as folder:
        gen_data.train_group("dlrm", rows, columns, *how, folder, [], 32)
        files = sorted(Path(folder).glob(f"*_b{samples}.npy"))
        looked_up = [np.load(file)[0] for file in files]
        ids = [np.load(file.with_name(f"{file.stem}_idx.npy"))[0] for file in files]
    return Lookups(
        torch.from_numpy(np.stack(ids)).to(torch.int64), torch.from_numpy(np.stack(looked_up))
    )

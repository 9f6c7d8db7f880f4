"""A small model that the tests serve, its weights in several versions, and what it says of them."""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from torchrec_bls.checkpoints import DELTA_SUFFIX, Head, TablePart, write_part

ROWS = {"user": 50, "item": 200, "category": 7}
FEATURES = list(ROWS)
DENSE = 3
OUTPUTS = {"click": (), "topics": (2,)}
#: Environment variable with the path of a folder. As long as that has a file KEEPER or SERVICE, the
#: model does not go on in that process; HELD is there when it has come so far.
HOLD = "TORCHREC_BLS_TEST_HOLD"
KEEPER, SERVICE, HELD = "keeper", "service", "held"
#: A first dense feature that kills the process.
POISON = 666.0
#: Environment variable with the path of a file. As long as it is there, `build_poisonous_unless`
#: raises.
RAISE = "TORCHREC_BLS_TEST_RAISE"
_COLUMNS = 8


class Ranker(nn.Module):
    """Returns two outputs by name, of dense features and weighted ids."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            device=torch.device(device),
            is_weighted=True,
            tables=[
                EmbeddingBagConfig(
                    name=f"{name}_table",
                    feature_names=[name],
                    num_embeddings=rows,
                    embedding_dim=_COLUMNS,
                )
                for name, rows in ROWS.items()
            ],
        )
        self.layer = nn.Linear(DENSE + _COLUMNS * len(ROWS), 3)

    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        _hold()
        pooled = self.tables(ids)
        found = self.layer(torch.cat([dense, *(pooled[name] for name in ROWS)], dim=1))
        return {"click": torch.tanh(found[:, 0]), "topics": 1e3 * found[:, 1:]}


class Poisonous(Ranker):
    """A ranker that kills its process if a sample has the first dense feature POISON."""

    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
        if (dense[:, 0] == POISON).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(dense, ids)


def build() -> nn.Module:
    return Ranker()


def build_poisonous_unless() -> nn.Module:
    if Path(os.environ[RAISE]).exists():
        raise ZeroDivisionError("no model today")
    return Poisonous()


def build_that_raises() -> nn.Module:
    raise ZeroDivisionError("no model today")


def build_that_waits() -> nn.Module:
    time.sleep(60)
    return Ranker()


@cache
def weights(version: int) -> dict[str, torch.Tensor]:
    """Returns weights of a version, at random."""
    # Of its own: other threads may draw as well.
    random = torch.Generator().manual_seed(version)
    return {
        name: torch.rand(each.shape, generator=random) - 0.5
        for name, each in Ranker("cpu").state_dict().items()
    }


def write_checkpoint(folder: Path, version: int, *, nan: bool = False) -> Path:
    """Writes a checkpoint, which is seen whole or not at all."""
    made = _weights_or_nan(version, nan)
    hidden = folder / f".{version}"
    hidden.mkdir()
    torch.save(made, hidden / "weights.pt")
    return hidden.rename(folder / f"v{version}")


def _weights_or_nan(version: int, nan: bool) -> dict[str, torch.Tensor]:
    made = dict(weights(version))
    if nan:
        made["layer.bias"] = made["layer.bias"] * float("nan")
    return made


def write_delta(folder: Path, version: int, base: str, *, nan: bool = False) -> Path:
    """Writes a delta of all rows and dense weights, which is seen whole or not at all."""
    made = _weights_or_nan(version, nan)
    tables = {
        name: TablePart(torch.arange(len(value)), {0: value})
        for name, value in made.items()
        if name.startswith("tables.")
    }
    dense = {name: value for name, value in made.items() if name not in tables}
    hidden = folder / f".{version}"
    hidden.mkdir()
    head = Head(f"v{version}", base, rank=0, ranks=1, trained=time.time())
    write_part(hidden, head, tables, dense)
    return hidden.rename(folder / f"v{version}{DELTA_SUFFIX}")


Bags = Mapping[str, Sequence[Sequence[int]]]
Weights = Mapping[str, Sequence[Sequence[float]]]


def expected(
    version: int, dense: Sequence[Sequence[float]], ids: Bags, weights_of_ids: Weights | None = None
) -> dict[str, torch.Tensor]:
    """Returns what the plain model says of a version.

    Args:
        version: version of the weights.
        dense: dense features of each sample.
        ids: ids of each feature in each sample.
        weights_of_ids: their weights; None: 1.
    """
    model = Ranker("cpu")
    model.load_state_dict(weights(version))
    bags = [bag for name in FEATURES for bag in ids[name]]
    if weights_of_ids is None:
        of_ids = [1.0 for bag in bags for _ in bag]
    else:
        of_ids = [each for name in FEATURES for bag in weights_of_ids[name] for each in bag]
    features = KeyedJaggedTensor(
        FEATURES,
        torch.tensor([each for bag in bags for each in bag], dtype=torch.int64),
        torch.tensor(of_ids, dtype=torch.float32),
        lengths=torch.tensor([len(bag) for bag in bags], dtype=torch.int32),
    )
    with torch.no_grad():
        outputs: dict[str, torch.Tensor] = model(
            torch.tensor(dense, dtype=torch.float32).reshape(-1, DENSE), features
        )
    return outputs


def _hold() -> None:
    if HOLD not in os.environ:  # most have no descriptor to spare
        return
    folder = Path(os.environ[HOLD])
    is_keeper = Path("/proc/self/comm").read_text() == "bls keeper\n"
    file = folder / (KEEPER if is_keeper else SERVICE)
    if file.exists():
        (folder / HELD).touch()
        end = time.monotonic() + 60
        while file.exists() and time.monotonic() < end:
            time.sleep(0.01)

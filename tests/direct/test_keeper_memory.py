"""A keeper never has its float tables in memory of its own."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.inference.modules import quantize_inference_model

from tests.processes import run
from torchrec_bls import keeper

ROWS, DIM = 800_000, 64
MIB = 1 << 20
FLOAT_BYTES = ROWS * DIM * 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(
            num_embeddings=ROWS, embedding_dim=DIM, name="t", feature_names=["f"]
        )
        self.bags = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))


def quantized() -> nn.Module:
    made: Any = quantize_inference_model(Model())
    return made  # type: ignore[no-any-return]


BUILDS = {"float": Model, "quantized": quantized}


def own_memory() -> int:
    """Returns the bytes of memory that only this process has."""
    [line] = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("RssAnon:")
    ]
    return int(line.split()[1]) << 10


class Peak:
    """The largest growth of this process's own memory, looked at all the time."""

    def __enter__(self) -> "Peak":
        self._before = self._most = own_memory()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._ends.wait(0.001):
            self._most = max(self._most, own_memory())

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        return self._most - self._before


def keep(rank: int, name: str, folder: str) -> tuple[int, int]:
    """Returns how much its own memory grows while a keeper loads, and while it publishes."""
    torch.set_num_threads(1)
    with Peak() as loading:
        made = keeper(BUILDS[name], f"{folder}/1.pt", f"{folder}/keeper")
    with Peak() as publishing:
        made.publish(f"{folder}/2.pt")
    assert made.version.startswith("2.pt@")
    return loading.growth, publishing.growth


@pytest.mark.parametrize("name", BUILDS)
def test_float_tables_are_not_in_its_own_memory(tmp_path: Path, name: str) -> None:
    for number in (1, 2):
        weights = torch.full((ROWS, DIM), float(number))
        torch.save({"bags.embedding_bags.t.weight": weights}, tmp_path / f"{number}.pt")
    for growth in run(1, keep, name, str(tmp_path), backend=None)[0]:
        assert growth < 0.75 * FLOAT_BYTES, f"{growth / MIB:.0f} MiB"

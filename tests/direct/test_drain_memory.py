"""A keeper that drains and its readers never have two generations in memory."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.inference.modules import quantize_inference_model

from tests.direct.nodes import until
from tests.processes import run
from torchrec_bls import attach, keeper
from torchrec_bls.direct import owner_part
from torchrec_bls.errors import RendezvousError

TABLES, ROWS, DIM = 3, 16_384, 64
# Indexes, and the pages of a piece that the rows do not fill.
SMALL = 256 << 10


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    num_embeddings=ROWS,
                    embedding_dim=DIM,
                    name=f"t{table}",
                    feature_names=[f"f{table}"],
                )
                for table in range(TABLES)
            ],
        )


def quantized() -> nn.Module:
    made: Any = quantize_inference_model(Model())
    return made  # type: ignore[no-any-return]


BUILDS: dict[str, Callable[[], nn.Module]] = {"float": Model, "quantized": quantized}


def weights_of(*numbers: int) -> dict[str, torch.Tensor]:
    return {
        f"bags.embedding_bags.t{table}.weight": torch.full((ROWS, DIM), float(number))
        for table, number in enumerate(numbers)
    }


def bytes_held(pids: list[int]) -> int:
    """Returns the bytes of all memory files of tables that processes have open or mapped."""
    files: dict[int, int] = {}
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            begin, end = (int(each, 16) for each in line.split()[0].split("-"))
            if "torchrec_bls" in line and "memfd" in line:
                inode = int(line.split()[4])
                files[inode] = max(files.get(inode, 0), end - begin)
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # that of this look
                if "torchrec_bls" in str(descriptor.readlink()):
                    found = descriptor.stat()
                    files[found.st_ino] = 512 * found.st_blocks
    return sum(files.values())


def serve(rank: int, name: str, folder: str, drain: bool) -> list[int] | None:
    """Rank 0 keeps the tables and publishes twice; rank 1 reads them. Returns the bytes that both
    have: of one version, the most while each piece of the next one is made, and the most while
    each piece is of a version of which one table is another one; and what is written of that."""
    torch.set_num_threads(1)
    told, end = Path(folder) / "reader", Path(folder) / "end"
    if rank == 1:
        model = BUILDS[name]()
        until(lambda: attached(model, f"{folder}/keeper"))
        told.with_suffix(".new").write_text(str(os.getpid()))
        told.with_suffix(".new").rename(told)
        until(end.exists)
        return None
    with keeper(BUILDS[name], weights_of(1, 1, 1), f"{folder}/keeper", version="1") as made:
        until(told.exists)
        pids = [os.getpid(), int(told.read_text())]
        one = bytes_held(pids)
        seen: list[int] = []

        def looked(*args: Any) -> Any:
            seen.append(bytes_held(pids))
            piece = original(*args)
            seen.append(bytes_held(pids))
            return piece

        original, owner_part._made = owner_part._made, looked
        made.publish(weights_of(2, 2, 2), version="2", drain=drain)
        whole, seen[:] = max(seen), []
        if drain:  # else the reader, which has no batches, holds its version
            until(lambda: bytes_held(pids) <= one + SMALL)
        written = made.publish(weights_of(2, 3, 2), version="3", drain=drain).bytes_written
        end.touch()
        return [one, whole, max(seen), written]


def attached(model: nn.Module, path: str) -> bool:
    try:
        attach(model, path)
    except RendezvousError:  # the keeper has not begun
        return False
    return True


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("name", BUILDS)
def test_one_generation_is_in_memory(tmp_path: Path, name: str, drain: bool) -> None:
    one, whole, in_part, written = run(2, serve, name, str(tmp_path), drain, backend=None)[0]
    least = TABLES * ROWS * DIM * (4 if name == "float" else 1)
    assert one > least
    assert written < one / 2
    if drain:
        assert max(whole, in_part) <= one + SMALL
    else:  # so that it would be seen
        assert whole > one + least
        assert in_part > one + least / 4

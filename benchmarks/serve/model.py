"""The model that is served: TorchRec's DLRM with Criteo's number of features, float and INT8.

`torchrec-bls serve benchmarks.serve.model:build --checkpoint DIR` serves it.
"""

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.inference.modules import quantize_inference_model
from torchrec.models.dlrm import DLRM

from benchmarks.serve import shape
from benchmarks.serve.traffic import Request
from torchrec_bls.checkpoints import open_checkpoint

KEYS = [f"f{table}" for table in range(shape.TABLES)]

#: By rows of a table the functions that build the model, by what the tables hold.
BUILDS = {
    shape.ROWS: {"float": "build", "INT8": "build_int8"},
    shape.QUICK_ROWS: {"float": "build_quick", "INT8": "build_quick_int8"},
}


class Ranker(nn.Module):
    """A DLRM whose answer are probabilities.

    Args:
        rows: rows of each table.
        device: of the tables; "meta" where others have their rows.
    """

    def __init__(self, rows: int, device: str = "meta") -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                num_embeddings=rows,
                embedding_dim=shape.DIM,
                name=f"t{table}",
                feature_names=[key],
            )
            for table, key in enumerate(KEYS)
        ]
        self.dlrm = DLRM(
            EmbeddingBagCollection(tables=tables, device=torch.device(device)),
            dense_in_features=shape.DENSE,
            dense_arch_layer_sizes=[128, shape.DIM],
            over_arch_layer_sizes=[128, 64, 1],
        )

    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor) -> torch.Tensor:
        """Scores, [B], of dense features, [B, 13], and of one id or more for each key."""
        scores: torch.Tensor = torch.sigmoid(self.dlrm(dense, ids)).squeeze(1)
        return scores


def build() -> nn.Module:
    """The float model."""
    return Ranker(shape.ROWS).eval()


def build_int8() -> nn.Module:
    """The model with INT8 tables."""
    return quantize_inference_model(build())


def build_quick() -> nn.Module:
    """The float model with small tables."""
    return Ranker(shape.QUICK_ROWS).eval()


def build_quick_int8() -> nn.Module:
    """The model with small INT8 tables."""
    return quantize_inference_model(build_quick())


def write_checkpoint(directory: Path, rows: int = shape.ROWS, seed: int = 0) -> None:
    """Writes float weights as safetensors, a file a table; the directory is there once it is whole.

    Rows are normal numbers. One table at a time is in memory.
    """
    unfinished = directory.with_name(f".{directory.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    torch.manual_seed(seed)
    weights = Ranker(rows).state_dict()
    dense = {name: tensor for name, tensor in weights.items() if not tensor.is_meta}
    weight_map = dict.fromkeys(dense, "dense.safetensors")
    save_file(dense, unfinished / "dense.safetensors")
    random = np.random.default_rng(seed)
    for table, name in enumerate(name for name in weights if name not in dense):
        values = random.standard_normal((rows, shape.DIM), dtype=np.float32)
        weight_map[name] = f"t{table}.safetensors"
        save_file({name: torch.from_numpy(values)}, unfinished / weight_map[name])
    index = {"metadata": {}, "weight_map": weight_map}
    (unfinished / "model.safetensors.index.json").write_text(json.dumps(index))
    unfinished.rename(directory)


def load(directory: Path, rows: int = shape.ROWS, int8: bool = False) -> nn.Module:
    """The model with all weights in memory of its own, by TorchRec alone."""
    model = Ranker(rows, device="cpu").eval()
    with open_checkpoint(directory) as weights:
        for name, parameter in model.state_dict().items():
            parameter.copy_(weights[name].whole())
    return quantize_inference_model(model) if int8 else model


@torch.no_grad()
def scores(model: nn.Module, request: Request) -> torch.Tensor:
    """What a model answers to a request, [B]."""
    ids = KeyedJaggedTensor(
        KEYS, torch.from_numpy(request.values), lengths=torch.from_numpy(request.lengths)
    )
    answer: torch.Tensor = model(torch.from_numpy(request.dense), ids)
    return answer


def main() -> None:
    made = argparse.ArgumentParser(description="Writes a checkpoint of the model that is served.")
    made.add_argument("directory", type=Path)
    made.add_argument("--quick", action="store_true", help="small tables")
    made.add_argument("--seed", type=int, default=0)
    arguments = made.parse_args()
    rows = shape.QUICK_ROWS if arguments.quick else shape.ROWS
    write_checkpoint(arguments.directory, rows, arguments.seed)


if __name__ == "__main__":
    main()

"""Checkpoints of each kind, written by the libraries that own the formats."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

Tensors = Mapping[str, torch.Tensor]


def write_distributed(folder: Path, tensors: Tensors) -> Path:
    path = folder / "distributed"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is no process group
        dcp.save(dict(tensors), checkpoint_id=path, no_dist=True)
    return path


def write_torch_file(folder: Path, tensors: Tensors) -> Path:
    torch.save(dict(tensors), folder / "model.pt")
    return folder / "model.pt"


def write_safetensors(folder: Path, tensors: Tensors) -> Path:
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    return folder / "model.safetensors"


WRITERS: dict[str, Callable[[Path, Tensors], Path]] = {
    "distributed": write_distributed,
    "torch file": write_torch_file,
    "safetensors": write_safetensors,
}

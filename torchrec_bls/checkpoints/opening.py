"""Opens a checkpoint, of whichever kind it is."""

import os
from pathlib import Path

from torchrec_bls.checkpoints.checkpoint import Checkpoint
from torchrec_bls.checkpoints.distributed import METADATA, open_distributed
from torchrec_bls.checkpoints.safetensors import INDEX, open_safetensors
from torchrec_bls.checkpoints.torch_file import open_torch_file

_SAFETENSORS = ".safetensors"
_TORCH = (".pt", ".pth", ".bin")
_CURE = (
    "give the path of a folder of torch.distributed.checkpoint, of a .safetensors file or a folder "
    "of them with their index, or of a .pt, .pth or .bin file of torch.save"
)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a checkpoint for reading by rows. Nothing is read of it but its description.

    What is in its files is not trusted: no function or class that they name is called. That the
    values are the right ones is the writer's word; no checksum of them is kept in these formats, or
    compared here.

    Args:
        path: a folder of torch.distributed.checkpoint; a .safetensors file, or a folder of several
            with a model.safetensors.index.json; a .pt, .pth or .bin file of torch.save, or a folder
            with one. A state dict may be in another dictionary, as its "state_dict" or "model".

    Raises:
        ValueError: there is no such checkpoint, or it is incomplete, or damaged; the text names the
            file and the cure.
    """
    path = Path(path)
    try:
        names = [path.name] if not path.is_dir() else sorted(each.name for each in path.iterdir())
        folder = path if path.is_dir() else path.parent
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read ({error}): {_CURE}") from error
    found = [folder / name for name in names if name.endswith(_SAFETENSORS)]
    indexes = [folder / name for name in names if name.endswith(INDEX)]
    torch_files = [folder / name for name in names if name.endswith(_TORCH)]
    is_distributed = METADATA in names and path.is_dir()
    kinds = {
        METADATA: is_distributed,
        _SAFETENSORS: bool(found or indexes),
        " or ".join(_TORCH): bool(torch_files),
    }
    of_kinds = [kind for kind, is_there in kinds.items() if is_there]
    if len(of_kinds) != 1 or len(torch_files) > 1:
        what = " and ".join(of_kinds) if of_kinds else "no checkpoint, or one not yet complete"
        count = f" ({len(torch_files)} files)" if len(torch_files) > 1 else ""
        raise ValueError(f"{path} has {what}{count}: {_CURE}")
    if is_distributed:
        return open_distributed(path)
    if torch_files:
        return open_torch_file(path, torch_files[0])
    return open_safetensors(path, found, indexes)


def why_incomplete(path: str | os.PathLike[str]) -> str:
    """Returns what keeps a checkpoint from being opened, such as a file that is still written.

    Empty if nothing does. See `open_checkpoint`.
    """
    try:
        open_checkpoint(path).close()
    except ValueError as error:
        return str(error)
    return ""

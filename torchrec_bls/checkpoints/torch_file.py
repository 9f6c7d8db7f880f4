"""Files of torch.save."""

from pathlib import Path

from torchrec_bls.checkpoints.checkpoint import Checkpoint
from torchrec_bls.checkpoints.files import Files
from torchrec_bls.checkpoints.rows import Block, Rows, StoredRows, Strided
from torchrec_bls.checkpoints.saved_tensors import Saved, SavedTensor, state_dict_in


def open_torch_file(path: Path, file: Path) -> Checkpoint:
    """Opens a file of torch.save.

    Args:
        path: path of the checkpoint: the file, or its folder.
        file: the file.

    Raises:
        ValueError: the file is something else, or cut off.
    """
    files = Files(file.parent)
    saved = Saved(files, file, 0, files.add(file), str(file))
    entries: dict[str, Rows | str] = {}
    for name, made in state_dict_in(saved.content, str(file)).items():
        if isinstance(name, str):
            try:
                tensor = saved.tensor(made, name)
                if tensor is not None:
                    entries[name] = _rows(tensor, f"'{name}' of {path}", files)
            except ValueError as error:
                entries[name] = str(error)
    return Checkpoint(path, entries, files)


def _rows(tensor: SavedTensor, where: str, files: Files) -> StoredRows:
    def find(values: Strided = tensor.values) -> Strided:
        return values

    shape, dtype = tensor.values.shape, tensor.values.dtype
    block = Block((0,) * len(shape), shape, find)
    return StoredRows(where, shape, dtype, [block], files, tensor.tensor_type)

"""What a checkpoint is to its readers: entries by name, and an identity."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType

from torchrec_bls.checkpoints.files import Files
from torchrec_bls.checkpoints.rows import Rows


class Checkpoint(Mapping[str, Rows]):
    """The tensors of a checkpoint by their names, read when they are asked for.

    A context manager. Closing it closes its files; reads in other threads end first.

    Args:
        path: file or folder of the checkpoint.
        entries: tensors, or for those that can't be read the reason.
        files: its files.

    Attributes:
        path: file or folder of the checkpoint.
        identity: digest in hexadecimals of names, inodes, sizes and times of its files. It tells a
            checkpoint from another one in the same place, without reading either.
        written: when the last of its files was written, in seconds since 1970.
    """

    def __init__(self, path: Path, entries: Mapping[str, Rows | str], files: Files) -> None:
        self.path = path
        self.identity = files.identity()
        self.written = files.written()
        self._entries = entries
        self._files = files

    def __getitem__(self, name: str) -> Rows:
        """Returns an entry.

        Raises:
            KeyError: there is none.
            ValueError: there is one, but not of a kind that can be read.
        """
        entry = self._entries[name]
        if isinstance(entry, str):
            raise ValueError(entry)
        return entry

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files; rows can't be read any more."""
        self._files.close()

"""The records of a zip file that torch.save has written: uncompressed, each in one piece."""

import io
import struct
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

from torchrec_bls.checkpoints.files import Files

_CURE = "save it again with torch.save, which does not compress"
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_MAGIC = b"PK\x03\x04"
_ENCRYPTED = 1


class Record(NamedTuple):
    """Bytes of a record within the file that has the zip."""

    begin: int
    size: int


class ZipRecords:
    """A zip file, or a zip file within another file.

    Args:
        files: files of the checkpoint.
        path: file that has the zip.
        begin: its first byte there.
        size: its bytes.
        where: what the zip is, for errors.

    Attributes:
        archive: name of the folder in the zip that has all records.

    Raises:
        ValueError: this is no zip, or not torch.save's.
    """

    def __init__(self, files: Files, path: Path, begin: int, size: int, where: str) -> None:
        self._files = files
        self._path = path
        self._begin = begin
        self._size = size
        self._where = where
        try:
            with zipfile.ZipFile(_Part(files, path, begin, size, where)) as opened:
                infos = opened.infolist()
        except _DAMAGED as damaged:
            raise ValueError(
                f"{where} is no zip file, or cut off ({damaged}): a checkpoint that is still "
                f"written is complete later, and one in torch.save's old format must be saved "
                "again with torch.save"
            ) from damaged
        self._infos = {info.filename: info for info in infos}
        if len(self._infos) < len(infos):
            raise ValueError(f"{where} has two records of one name: {_CURE}")
        pickles = [name for name in self._infos if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(
                f"{where} is a zip file, but has {len(pickles)} records 'data.pkl', and so is not "
                "torch.save's: give the path of a checkpoint"
            )
        self.archive = pickles[0].removesuffix("/data.pkl")

    def __contains__(self, name: str) -> bool:
        return f"{self.archive}/{name}" in self._infos

    def find(self, name: str) -> Record:
        """Returns where a record is, by its name within the archive.

        Raises:
            ValueError: there is none, it is compressed, or not within the file.
        """
        info = self._infos.get(f"{self.archive}/{name}")
        if info is None:
            raise ValueError(f"{self._where} has no record '{name}': {_CURE}")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _ENCRYPTED:
            raise ValueError(f"record '{name}' of {self._where} is compressed: {_CURE}")
        what = f"the head of record '{name}' of {self._where}"
        at, end = info.header_offset, self._size
        if 0 <= at <= end - _LOCAL_HEADER.size:
            head = self._files.read(self._path, self._begin + at, _LOCAL_HEADER.size, what)
            magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(head)
            begin = at + _LOCAL_HEADER.size + name_bytes + extra_bytes
            if magic == _MAGIC and begin + info.file_size <= end:
                return Record(self._begin + begin, info.file_size)
        raise ValueError(f"record '{name}' of {self._where} is not where it should be: {_CURE}")

    def read(self, name: str, most: int) -> bytes:
        """Returns the bytes of a record.

        Raises:
            ValueError: there is none, or it has more than `most` bytes.
        """
        found = self.find(name)
        what = f"record '{name}' of {self._where}"
        if found.size > most:
            raise ValueError(f"{what} has {found.size:,} bytes, more than {most:,}: {_CURE}")
        return self._files.read(self._path, found.begin, found.size, what)


class _Part(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, files: Files, path: Path, begin: int, size: int, where: str) -> None:
        self._files = files
        self._path = path
        self._begin = begin
        self._size = size
        self._where = where
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if at < 0:
            raise OSError("before the beginning")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        memory = memoryview(buffer).cast("B")
        memory = memory[: max(0, self._size - self._at)]
        self._files.read_into(self._path, self._begin + self._at, memory, self._where)
        self._at += len(memory)
        return len(memory)


# What zipfile raises for damaged files, besides its own error.
_DAMAGED = (
    *(zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError),
    *(struct.error, LookupError, OverflowError, zlib.error),
)

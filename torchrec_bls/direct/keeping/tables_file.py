"""A file that says where a keeper's tables are, so that its successor finds them in the readers.

Readers hold the control pages, and indexes and pieces of the version that they read. So nobody has
to offer them: a process of this user opens them through /proc, as a reader opens a new version.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import structs

from torchrec_bls import _native
from torchrec_bls.direct.file_holders import holders_of
from torchrec_bls.direct.keeping.model_tables import OWNER, ModelTables, ServedVersion
from torchrec_bls.direct.offers.collections import Collection
from torchrec_bls.direct.offers.file_lock import opened_own
from torchrec_bls.direct.offers.manifest import Manifest
from torchrec_bls.direct.offers.offer import manifest_of
from torchrec_bls.direct.offers.read_tables import check_same
from torchrec_bls.direct.part_index import Address
from torchrec_bls.direct.process import this_process
from torchrec_bls.direct.serving.served_model import ServedModel
from torchrec_bls.errors import ProtocolError, RendezvousError
from torchrec_bls.records import Positive, Record, Whole, decode, read_bytes

_CURE = "remove it, and the next keeper loads its checkpoint"

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
# Process, descriptor, device, inode and bytes.
_Address = tuple[_Number, _Number, Whole, Whole, Whole]


class _Version(Record):
    serial: Positive
    version: str
    indexes: list[_Address]


class _Content(Record):
    manifest: Any
    pages: list[_Address]
    versions: list[_Version]


class TablesFile(NamedTuple):
    """What a file tells.

    Attributes:
        manifest: modules of the model.
        pages: process, descriptor, device, inode and bytes of each module's control page.
        versions: versions that its keeper has served last, the newest first.
    """

    manifest: Manifest
    pages: list[Address]
    versions: list[ServedVersion]


def version_served(served: ServedModel) -> ServedVersion:
    """Returns the version that a model serves. This process owns its tables."""
    serving, _ = served.snapshot()
    indexes = [generation.parts[OWNER].index.address for generation in serving]
    return ServedVersion(serving[0].serial, serving[0].version, indexes)


def write_tables_file(path: str, served: ServedModel, versions: Sequence[ServedVersion]) -> None:
    """Says where the tables of a model are. Whoever reads the file sees all of it, or all of the
    one before.

    Args:
        path: path of the file.
        served: the model.
        versions: versions that it has served last, the newest first.

    Raises:
        ValueError: the file can't be written.
    """
    serving, _ = served.snapshot()
    content = {
        "manifest": manifest_of(served.modules, serving[0]).as_json(),
        "pages": [reads.tables.page.address for reads in served.reads],
        "versions": [version._asdict() for version in versions],
    }
    new = f"{path}.new"
    try:
        with opened_own(new) as file:
            file.truncate(0)
            file.write(msgspec.json.encode(content))
        os.replace(new, path)  # noqa: PTH105
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error}") from error


def held_tables(path: str, collections: Mapping[str, Collection]) -> ModelTables | None:
    """Returns the tables that a file tells of, if a process holds them.

    Args:
        path: path of the file.
        collections: embedding modules of the model, by name.

    Returns:
        None if there is no file, or no process holds the tables any more.

    Raises:
        ValueError: the tables are of another model than `collections`, or the file is another
            user's.
        ProtocolError: another version of this package has written the file.
        RendezvousError: this process can't look for the holders, or can't map a control page.
    """
    if not Path(path).exists():
        return None
    try:
        with opened_own(path):
            manifest, pages, versions = read_tables_file(Path(path))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if manifest.host != this_process().host:  # it was restarted, or is another one
        return None
    files = [(device, inode) for _, _, device, inode, _ in pages]
    try:
        holders = holders_of(files)
    except OSError as error:
        raise RendezvousError(
            f"cannot look who holds the tables of {path}: {error}. Raise the limit of open files "
            "(ulimit -n)"
        ) from error
    if not holders.keys() >= set(files):
        return None
    if missing := sorted(collections.keys() - {module.name for module in manifest.modules}):
        raise ValueError(
            f"readers of {path} have no tables of {missing}, which this model has: keep another "
            "model at another path, or end these readers before"
        )
    check_same(collections, manifest.modules, path)
    tables = []
    for module, (*_, size), file in zip(manifest.modules, pages, files, strict=True):
        address = (*holders[file], *file, size)
        page = _native.ControlPage.open(address, 1, bytes.fromhex(module.digest))
        tables.append(collections[module.name].tables(module, page))
        tables[-1].check_places()
    return ModelTables(manifest.modules, tables, versions)


def read_tables_file(path: Path) -> TablesFile:
    """Reads a file.

    Raises:
        ProtocolError: another version of this package has written it, or something else is there.
        OSError: it can't be read.
    """
    data = read_bytes(path, error=ProtocolError)
    content = decode(data, _Content, str(path), _CURE, ProtocolError)
    manifest = Manifest.from_json(content.manifest, str(path))
    versions = [ServedVersion(**structs.asdict(each)) for each in content.versions]
    counts = {len(manifest.modules), len(content.pages), *(len(each.indexes) for each in versions)}
    if len(counts) > 1 or any(len(module.sizes) > 1 for module in manifest.modules):
        raise ProtocolError(f"{path} tells of no tables of one owner: {_CURE}")
    return TablesFile(manifest, content.pages, versions)

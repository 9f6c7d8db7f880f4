"""A file that says where a keeper's tables are, so that its successor finds them in the readers.

Readers hold the control pages, and indexes and pieces of the version that they read. So nobody has
to offer them: a process of this user opens them through /proc, as a reader opens a new version.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from torchrec_bls import _native
from torchrec_bls.direct.file_holders import holders_of
from torchrec_bls.direct.keeping.model_tables import OWNER, LastVersion, ModelTables
from torchrec_bls.direct.offers.collections import Collection
from torchrec_bls.direct.offers.file_lock import opened_own
from torchrec_bls.direct.offers.manifest import Manifest
from torchrec_bls.direct.offers.offer import manifest_of
from torchrec_bls.direct.offers.read_tables import check_same
from torchrec_bls.direct.process import this_process
from torchrec_bls.direct.serving.served_model import ServedModel
from torchrec_bls.errors import ProtocolError, RendezvousError
from torchrec_bls.records import Record, Whole, decode

_CURE = "remove it, and the next keeper loads its checkpoint"


_Address = tuple[Whole, Whole, Whole, Whole, Whole]


class _Content(Record):
    manifest: Any
    # Process, descriptor, device, inode and bytes of each module's control page.
    pages: list[_Address]
    # The same of each module's index in the version of the manifest.
    indexes: list[_Address]


def write_tables_file(path: str, served: ServedModel) -> None:
    """Says where the tables of a model are, and the version that it serves. Whoever reads the file
    sees all of it, or all of the one before.

    Args:
        path: path of the file.
        served: the model.

    Raises:
        ValueError: the file can't be written.
    """
    serving, _ = served.snapshot()
    content = {
        "manifest": manifest_of(served.modules, serving[0]).as_json(),
        "pages": [reads.tables.page.address for reads in served.reads],
        "indexes": [generation.parts[OWNER].index.address for generation in serving],
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
    with opened_own(path):
        data = Path(path).read_bytes()
    content = decode(data, _Content, path, _CURE, ProtocolError)
    manifest = Manifest.from_json(content.manifest, path)
    if manifest.host != this_process().host:  # it was restarted, or is another one
        return None
    files = [(device, inode) for _, _, device, inode, _ in content.pages]
    try:
        holders = holders_of(files)
    except OSError as error:
        raise RendezvousError(
            f"cannot look who holds the tables of {path}: {error}. Raise the limit of open files "
            "(ulimit -n)"
        ) from error
    counts = {len(manifest.modules), len(content.pages), len(content.indexes)}
    if len(counts) > 1 or not holders.keys() >= set(files):
        return None
    check_same(collections, manifest.modules, path)
    tables = []
    for module, (*_, size), file in zip(manifest.modules, content.pages, files, strict=True):
        address = (*holders[file], *file, size)
        digest, owners = bytes.fromhex(module.digest), len(module.sizes)
        page = _native.ControlPage.open(address, owners, digest)
        tables.append(collections[module.name].tables(module, page))
        tables[-1].check_places()
    last = LastVersion(manifest.serial, manifest.version, content.indexes)
    return ModelTables(manifest.modules, tables, last)

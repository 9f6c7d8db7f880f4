"""A process that owns all tables of a model, and computes nothing.

docs/design/tables-for-a-service.md says who holds what when it dies.
"""

import logging
import os
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn

from torchrec_bls.collective.transport.deadlines import check_deadline
from torchrec_bls.direct.arguments import check_version
from torchrec_bls.direct.keeping.checkpoint_weights import AnyCheckpoint, opened
from torchrec_bls.direct.keeping.found_delta import FoundDelta
from torchrec_bls.direct.keeping.model_tables import OWNER, ModelTables, ServedVersion
from torchrec_bls.direct.keeping.path_lock import PathLock
from torchrec_bls.direct.keeping.tables_file import (
    held_tables,
    version_served,
    write_tables_file,
)
from torchrec_bls.direct.keeping.watch import FoundCheckpoint, Watch, check_watch
from torchrec_bls.direct.offers.collections import collections_of
from torchrec_bls.direct.offers.offer import offer
from torchrec_bls.direct.offers.read_tables import check_has_memory, read_tables
from torchrec_bls.direct.process import this_process
from torchrec_bls.direct.serving.dense_state import DenseState
from torchrec_bls.direct.serving.handing_on import await_a_holder
from torchrec_bls.direct.serving.ownership import Ownership
from torchrec_bls.direct.serving.probe import Probe
from torchrec_bls.direct.serving.publisher import Publication
from torchrec_bls.direct.serving.publishing import publish, publish_rows
from torchrec_bls.direct.serving.served_model import ServedModel
from torchrec_bls.distributed.config import BLSConfig
from torchrec_bls.distributed.outputs.inference_mode import outside_inference_mode
from torchrec_bls.errors import ProtocolError
from torchrec_bls.lifetime import do_all

# Seconds until a version is mapped: tens of gigabytes take minutes, since lookups go first.
_DEADLINE = 600.0
# Seconds that a publication may take to end when the keeper is closed.
_ENDING = 60.0
# Seconds that a reader may take to map the last version before the keeper is closed.
_HANDING_ON = 10.0
# Versions that a successor is told of. Readers that are so far behind are stopped.
_REMEMBERED = 8
_log = logging.getLogger(__name__)


class Keeper:
    """The owner of a model's tables, until it is closed or its process ends. `keeper` returns it.
    It is a context manager.

    Args:
        build: see `keeper`.
        checkpoint: see `keeper`.
        path: see `keeper`.
        version: see `keeper`.
        config: see `keeper`.

    Attributes:
        model: model of this process, which reads the tables.
        path: see `keeper`.
        took_over: whether readers had the tables already, of a keeper before this one, so that
            nothing was loaded.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        checkpoint: AnyCheckpoint,
        path: str,
        version: str | None,
        config: BLSConfig,
    ) -> None:
        self.path = path
        self._file = f"{path}.tables"
        self._process = this_process()
        self._closed = threading.Event()
        self._watches: list[Watch] = []
        self._lock = PathLock(path)
        try:
            self._begin(build(), checkpoint, version, config)
        except BaseException:
            self._lock.release()
            raise

    @outside_inference_mode
    @torch.no_grad()
    def _begin(
        self,
        model: nn.Module,
        checkpoint: AnyCheckpoint,
        version: str | None,
        config: BLSConfig,
    ) -> None:
        collections = collections_of(model)
        check_has_memory(DenseState(model, [each.module for each in collections.values()]))
        of_model = None
        try:
            of_model = held_tables(self._file, collections)
        except ProtocolError as error:
            _log.warning("%s; the checkpoint is loaded", error)
        if of_model is None:
            of_model = ModelTables.new(collections, config)
        ownership = Ownership([each.page for each in of_model.tables])
        ownership.take_over(OWNER)
        try:
            received = of_model.newest_held(self.path)
            self.took_over = received is not None
            if received is None:
                with opened(checkpoint) as (weights, name):
                    received = of_model.load(
                        model, collections, weights, version or name, self.path
                    )
            read_tables(model, collections, received, OWNER, has_place=True)
            self.model = model
            self._served = ServedModel.of(model)
            self._versions: list[ServedVersion] = list(of_model.served)
            self._write_tables_file()
            self._offer = offer(model, self.path)
        except BaseException:
            ownership.give_up(OWNER)
            raise

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def version(self) -> str:
        """Returns the version that serves."""
        return self._served.publisher.follower.newest[0].version

    def publish(
        self,
        checkpoint: AnyCheckpoint,
        *,
        probe: Probe | None = None,
        drain: bool = False,
        version: str | None = None,
        deadline: float = _DEADLINE,
    ) -> Publication:
        """Publishes a checkpoint, and returns when this process has let go of the version before.

        Args:
            checkpoint: see `keeper`.
            probe: see `torchrec_bls.publish`.
            drain: see `torchrec_bls.publish`.
            version: see `keeper`.
            deadline: seconds to wait for another thread that publishes, again until all processes
                have let go of the version before (with `drain`), and again until the new one is
                mapped.

        Raises:
            ValueError: see `torchrec_bls.publish`, or the keeper is closed.
            RendezvousError: there is no memory for two versions.
            PeerTimeoutError: another thread has not finished publishing, or the version is not
                mapped by the deadline, or processes have not let go; see `torchrec_bls.publish`.
        """
        check_deadline(deadline)
        self._refuse_closed()
        with opened(checkpoint) as (weights, name):
            publication = publish(
                self.model,
                weights,
                probe=probe,
                drain=drain,
                version=version or name,
                deadline=deadline,
            )
        self._go_over(publication, deadline)
        return publication

    def publish_rows(
        self,
        rows: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
        *,
        version: str,
        base: str,
        dense: Mapping[str, Any] | None = None,
        probe: Probe | None = None,
        trained: float | None = None,
        deadline: float = _DEADLINE,
    ) -> Publication:
        """Publishes rows of some tables and dense weights, and returns when this process has let go
        of the version before.

        Args:
            rows: see `torchrec_bls.publish_rows`.
            version: see `torchrec_bls.publish_rows`.
            base: see `torchrec_bls.publish_rows`.
            dense: see `torchrec_bls.publish_rows`.
            probe: see `torchrec_bls.publish_rows`.
            trained: see `torchrec_bls.publish_rows`.
            deadline: see `torchrec_bls.publish_rows`. Again so many seconds until the version is
                mapped.

        Raises:
            ValueError: see `torchrec_bls.publish_rows`, or the keeper is closed.
            RendezvousError: there is no memory for two copies of the tables.
            PeerTimeoutError: see `torchrec_bls.publish_rows`, or the version is not mapped by the
                deadline.
        """
        check_deadline(deadline)
        self._refuse_closed()
        publication = publish_rows(
            self.model,
            rows,
            version=version,
            base=base,
            dense=dense,
            probe=probe,
            trained=trained,
            deadline=deadline,
        )
        self._go_over(publication, deadline)
        return publication

    def _refuse_closed(self) -> None:
        if self._closed.is_set():
            raise ValueError(f"the keeper of {self.path} is closed")

    def _go_over(self, publication: Publication, deadline: float) -> None:
        """Lets go of the version before one that was published, and tells a successor of it."""
        publication.wait(deadline)
        self._served.take_newest()
        try:
            self._write_tables_file()
        except ValueError as error:  # the version serves, whatever is written
            _log.warning("%s; a successor may have to load its checkpoint", error)

    def _write_tables_file(self) -> None:
        """Tells a successor where the tables are. It tells of several versions: readers may have
        mapped none of the last ones when this process dies."""
        newest = version_served(self._served)
        before = [each for each in self._versions if each.serial != newest.serial]
        self._versions = [newest, *before][:_REMEMBERED]
        write_tables_file(self._file, self._served, self._versions)

    def watch(
        self,
        directory: str | os.PathLike[str],
        keep: int = 2,
        *,
        probe: Probe | None = None,
        drain: bool = False,
        pause: float = 5.0,
        deadline: float = _DEADLINE,
    ) -> Watch:
        """Publishes the checkpoints and deltas that come into a directory until the keeper is
        closed; see `torchrec_bls.watch`."""
        check_watch(keep, probe, pause)
        check_deadline(deadline)

        def publish_checkpoint(kept: Keeper, found: FoundCheckpoint) -> None:
            kept.publish(
                found.path, probe=probe, drain=drain, version=found.version, deadline=deadline
            )

        def publish_delta(kept: Keeper, found: FoundDelta, base: str) -> None:
            rows, dense = found.read(kept.model)
            kept.publish_rows(
                rows,
                version=found.version,
                base=base,
                dense=dense,
                probe=probe,
                trained=found.trained,
                deadline=deadline,
            )

        made = Watch(
            self,
            publish_checkpoint,
            publish_delta,
            lambda kept: kept.version,
            os.fsdecode(directory),
            keep,
            pause,
            drain,
        )
        self._watches.append(made)
        return made

    def run(self) -> None:
        """Returns when the keeper is closed, by another thread or a signal's handler."""
        self._closed.wait()

    def close(self) -> None:
        """Lets another process keep the tables. Readers go on, and follow it.

        It waits until a reader has the version that serves, for 10 s: else the version would end
        with this process, and the successor would have to go back to the one before. In a forked
        child it does nothing: the keeper is the parent's.

        Raises:
            PeerTimeoutError: a thread has not finished publishing. The keeper goes on.
        """
        if not self._process.is_own or self._closed.is_set():
            return
        do_all(each.close for each in self._watches)
        self._served.give_up(_ENDING)
        page, newest = self._served.reads[0].tables.page, self._served.publisher.follower.newest
        if not await_a_holder(page, newest, _HANDING_ON):
            _log.warning(
                "no reader of %s has mapped version %r yet: it is lost if this process ends before "
                "one has",
                self.path,
                self.version,
            )
        self._closed.set()
        do_all([self._offer.close, self._lock.release])


def keeper(
    build: Callable[[], nn.Module],
    checkpoint: AnyCheckpoint,
    path: str | os.PathLike[str],
    *,
    version: str | None = None,
    config: BLSConfig | None = None,
) -> Keeper:
    """Makes this process the owner of all tables of a model, for readers that attach at a path.

    It needs no process group. Tables are made from the checkpoint step by step, in shared memory
    alone. Readers that have attached, `attach(model, path)`, go on when this process ends. The next
    keeper at the path takes the tables over from them, with the version that serves, and loads
    nothing. Only if there are none it loads its checkpoint.

    Args:
        build: function that returns the model, not sharded. Its EmbeddingBagCollections and
            EmbeddingCollections are float or quantized, and may be on the device "meta". All other
            weights are overwritten.
        checkpoint: path of a checkpoint with all weights, by their names in the state dict of the
            model, or the weights. Those of quantized tables are float or stored rows, as in
            `publish`.
        path: path of a socket, at most 107 bytes as an absolute one. Two small files stay beside
            it: `PATH.lock`, and `PATH.tables`, by which a successor finds the tables.
        version: name of the version that the checkpoint makes. None: the name of its file or
            folder, with the first digits of its identity.
        config: `bad_ids` and `huge_pages` of the tables. None: BLSConfig(lookup="direct"). Tables
            that are taken over keep theirs.

    Raises:
        ValueError: another process keeps tables at `path`, which the text names; readers of another
            model hold the tables there; the model has no tables that can be read directly, or the
            checkpoint lacks weights or has others.
        RendezvousError: there is no memory for the tables, or no descriptor left.
    """
    if version is not None:
        check_version(version)
    # The process may change its folder before it ends.
    place = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 (as it is given)
    return Keeper(build, checkpoint, place, version, config or BLSConfig(lookup="direct"))

"""Hands tables over to processes that come later, through a Unix socket."""

import os
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

from torchrec_bls import _native
from torchrec_bls.direct.dense_weights import dense_parts
from torchrec_bls.direct.float_tables import FloatTables
from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.offers.conversation import Conversation
from torchrec_bls.direct.offers.listening import listen
from torchrec_bls.direct.offers.manifest import Manifest, OfferedModule, OfferedTable
from torchrec_bls.direct.process import this_process
from torchrec_bls.direct.reads.drained_view import why_drained
from torchrec_bls.direct.serving.reading_modules import ReadingModule
from torchrec_bls.direct.serving.served_model import ServedModel
from torchrec_bls.direct.shared_tables import SharedTables
from torchrec_bls.errors import BLSError, named
from torchrec_bls.lifetime import Living, When, at_exit, do_all, kept_from_children
from torchrec_bls.quant.shared_rows import SharedRows

# Seconds that one process may take; it spends most of them mapping tables.
_DEADLINE = 60.0
# Seconds that each thread may take at the end of the process.
_ENDING = 5.0
# Seconds until the next try to accept a connection, after one that failed, and after many.
_PAUSE = 0.05
_LONGEST_PAUSE = 2.0


class Offer:
    """Hands tables over until it is closed, or its model is collected. `offer` returns it. It is a
    context manager.

    Args:
        model: see `offer`.
        path: see `offer`.

    Attributes:
        path: see `offer`.
        problem: why the last process that came could not be taken or got no tables, although it did
            nothing wrong; empty if it got them.
    """

    def __init__(self, model: nn.Module, path: str) -> None:
        ServedModel.of(model)
        self._process = this_process()
        self.path = path
        self.problem = ""
        self._model = weakref.ref(model, self._end)
        self._ends = False
        self._serving: list[tuple[threading.Thread, socket.socket]] = []
        self._thread = threading.Thread(
            target=self._take_connections, name="torchrec_bls offer", daemon=True
        )
        try:
            self._listener = listen(path)
            self._file = Path(path).stat().st_ino
            _offers.add(self)
            self._thread.start()
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> "Offer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Accepts no more processes, and removes the socket. Processes that have attached go on.
        One that is attaching gets PeerDiedError. In a forked child it does nothing: the offer is
        the parent's."""
        if not self._process.is_own:
            return
        self._end()
        self._thread.join(_ENDING)
        for thread, connected in self._serving:
            with suppress(OSError):  # the process has ended
                connected.shutdown(socket.SHUT_RDWR)
            thread.join(_ENDING)

    def _end(self, *_: object) -> None:
        """Removes the socket, and has the thread end. It waits for nobody: the collector of garbage
        calls it, in any thread. A forked child leaves the parent's as it is."""
        if self._ends or not self._process.is_own:
            return
        self._ends = True
        with suppress(OSError, AttributeError):  # it is not there, or not yet
            if Path(self.path).stat().st_ino == self._file:
                Path(self.path).unlink()
        with suppress(OSError, AttributeError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it
        if not self._thread.is_alive():
            with suppress(AttributeError):
                self._listener.close()

    def _take_connections(self) -> None:
        with self._listener:
            pause = _PAUSE
            while not self._ends:
                try:
                    self._take_one()
                    pause = _PAUSE
                except Exception as error:  # no descriptor, no thread or no memory is left
                    if not self._ends:
                        self.problem = named(error)
                        time.sleep(pause)
                        pause = min(2 * pause, _LONGEST_PAUSE)

    def _take_one(self) -> None:
        connected = kept_from_children(self._listener.accept()[0])
        # A process that is stopped in the middle does not block others.
        thread = threading.Thread(
            target=self._serve, args=(connected,), name="torchrec_bls hand-over", daemon=True
        )
        try:
            thread.start()
        except BaseException:
            connected.close()
            raise
        self._serving = [each for each in self._serving if each[0].is_alive()]
        self._serving.append((thread, connected))

    def _serve(self, connected: socket.socket) -> None:
        try:
            with closing(Conversation(connected, self.path, _DEADLINE)) as conversation:
                self._hand_over(conversation)
            self.problem = ""
        except BLSError:
            pass  # the other end knows, or is gone
        except Exception as error:
            self.problem = named(error)

    def _hand_over(self, conversation: Conversation) -> None:
        conversation.greet()
        try:
            # This comes first. Otherwise a refused process would fail to send it and never read
            # why.
            conversation.be_greeted()
            conversation.peer()
            model = self._model()
            if model is None:
                raise ValueError("the model that was offered is not there any more")
            served = ServedModel.of(model)
            serving, weights = served.snapshot()
            if serving[0].drained_for:
                why = why_drained(served.reads[0].tables, serving[0])
                conversation.send({"drained": why}, [])
                return
            dense = _segment_of(weights, serving[0], served.reads[0].tables)
            manifest = manifest_of(served.modules, serving[0])
        except Exception as error:
            conversation.send({"refused": named(error)}, [])
            return
        # What is under way stays, even if another version serves meanwhile or this process ends.
        conversation.send(manifest.as_json(), _descriptors_of(served, serving, dense))


def offer(model: nn.Module, path: str | os.PathLike[str]) -> Offer:
    """Lets other processes of this user attach to the tables that a model reads directly.

    A thread listens on a Unix socket. It hands over the descriptors of the tables that are served
    at the moment, with their dense weights. Batches do not wait for that, with one exception: the
    copy of the dense weights, if the version changes at the same time.

    Args:
        model: model that has been called once with BLSConfig(lookup="direct"), or has attached.
        path: path of the socket, at most 107 bytes as an absolute one. A dead process's socket
            there is replaced.

    Returns:
        An object that hands tables over until it is closed, or the model is collected, or this
        process ends.

    Raises:
        ValueError: the model does not read all its tables directly. Or a living process offers
            tables at `path`, or `path` is too long or something else than a socket.
    """
    # The process may change its folder before the offer ends.
    return Offer(model, os.path.abspath(os.fsdecode(path)))  # noqa: PTH100 (as it is given)


def manifest_of(modules: Mapping[str, ReadingModule], serving: Generation) -> Manifest:
    """Returns what another process has to know of a model whose tables it reads.

    Args:
        modules: modules that read tables, by name.
        serving: generation of the first one, of the version that is handed over.
    """
    return Manifest(
        this_process().host,
        serving.version,
        serving.serial,
        [_module_of(name, module) for name, module in modules.items()],
    )


def _module_of(name: str, module: ReadingModule) -> OfferedModule:
    reads = module.direct_reads
    assert reads is not None
    tables = reads.tables
    configs = {config.name: config for config in reads.configs}
    return OfferedModule(
        name=name,
        quantized=isinstance(tables, SharedRows),
        pooled=reads.pooled,
        weighted=module.input_check.is_weighted,
        bad_ids=module.input_check.bad_ids,
        form=reads.as_json(),
        tables=[
            OfferedTable(
                layout,
                tables.offsets_of(layout) if isinstance(tables, FloatTables) else [],
                list(config.feature_names),
                config.pooling.value if reads.pooled else "",
            )
            for layout in tables.layouts.values()
            for config in [configs[layout.name]]  # a reader's model may have another order
        ],
        sizes=list(tables.sizes),
        pieces=[len(cut.pieces) for cut in tables.cuts],
        dtype=str(tables.dtype if isinstance(tables, FloatTables) else torch.uint8),
        huge_pages=tables.huge_pages,
        digest=tables.digest.hex(),
    )


def _segment_of(
    weights: Mapping[str, torch.Tensor], serving: Generation, tables: SharedTables
) -> _native.TableSegment:
    """Returns a segment with only dense weights, which belongs to none of the owners."""
    parts, size = dense_parts(weights, _native.FIRST_TABLE_OFFSET)
    return _native.TableSegment.create(
        (tables.owners, serving.version, tables.digest),
        parts,
        size,
        False,
    )


def _descriptors_of(
    served: ServedModel, serving: Sequence[Generation], dense: _native.TableSegment
) -> list[int]:
    descriptors = []
    for reads, generation in zip(served.reads, serving, strict=True):
        descriptors.append(reads.tables.page.descriptor)
        for part in generation.parts:
            descriptors += part.descriptors
    return [*descriptors, dense.descriptor]


_offers: Living[Offer] = Living()


@at_exit(When.OFFERS)
def _close_all() -> None:
    do_all(each.close for each in _offers)

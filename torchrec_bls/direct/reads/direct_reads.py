"""The tables of all ranks, as one module reads them."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import nn
from torchrec.distributed.types import LazyAwaitable

from torchrec_bls import _native
from torchrec_bls.direct.generation import Generation
from torchrec_bls.direct.gpu.registered_tables import RegisteredTables
from torchrec_bls.direct.gpu.under_way import ForwardsUnderWay
from torchrec_bls.direct.live_weights import LiveWeights
from torchrec_bls.direct.reads.drained_view import DrainedView
from torchrec_bls.direct.shared_tables import SharedTables
from torchrec_bls.direct.steps import Content
from torchrec_bls.distributed.exchanges.awaitable import ExchangeAwaitable
from torchrec_bls.distributed.inputs.input_check import CheckedBatch, InputCheck
from torchrec_bls.errors import BLSError, RendezvousError


class DirectEmbeddings(ExchangeAwaitable[Any], LazyAwaitable[Any]):  # type: ignore[misc]
    """Embeddings that need no waiting.

    Attributes:
        version: version of the weights that they come from.
    """

    def __init__(self, embeddings: Any, version: str) -> None:
        super().__init__()
        self._embeddings = embeddings
        self.version = version

    def _wait_impl(self) -> Any:
        return self._embeddings


class View(Protocol):
    """What lookups read of one generation. Nothing of it ever changes, so that a lookup which holds
    it needs no lock: neither a switch nor another thread's batch touches it."""

    @property
    def generation(self) -> Generation:
        """Returns the generation."""


class Pins(Protocol):
    """What keeps the rows of generations as they are, as long as somebody refers to it.

    Attributes:
        held: serial number of a generation that is pinned, and its pin; 0: none is.
    """

    held: tuple[int, object]

    def of(self, generation: Generation) -> object | None:
        """Returns a pin of a generation, or None if its rows are written over by now."""


class _OnTrial:
    """Pins of a generation on trial: whoever could write over it waits for the end of that."""

    def __init__(self, generation: Generation) -> None:
        self.held: tuple[int, object] = generation.serial, generation

    def of(self, generation: Generation) -> object:
        return generation


V = TypeVar("V", bound=View)


class DirectReads(ABC, Generic[V]):
    """The tables that a module reads. Any number of threads may look batches up.

    Args:
        where: name of the module and its rank, for messages.
        tables: tables in shared memory.
        live: weights of this rank; None where a process has shared no tables itself.
        rank: rank whose tables this process publishes; None where it only reads. A forked child
            does not publish: see SharedTables.process.
        configs: EmbeddingConfig or EmbeddingBagConfig of each table.

    Attributes:
        where: see above.
        tables: see above.
        live: see above.
        rank: see above.
        configs: see above.
        rows_read: rows read of each rank's shards, in all batches of this process, int64 [ranks].
            Those of quantized tables are not counted, nor those that a GPU reads.
        last_version: version that the last batch saw, if another one has been read since without a
            batch; None: it is that of `generation`.
        followed: whether a ServedModel follows the versions. One that was made in the parent goes
            on in a forked child.
        pins: pins of generations that have a side. None: nothing pins, so that none of these can
            be read.
        under_way: forwards whose rows the GPU may still read. Their ids may be on the GPU, which
            checks them as it reads. None: the CPU reads the rows.
    """

    # What else can be done about weights that were written to.
    _other_cure: ClassVar[str] = ""

    # The one attribute that a switch changes. A lookup reads it once.
    _view: V | DrainedView

    def __init__(
        self,
        where: str,
        tables: SharedTables,
        live: LiveWeights | None,
        rank: int | None,
        configs: Sequence[Any],
    ) -> None:
        self.where = where
        self.tables = tables
        self.live = live
        self.rank = rank
        self.configs = list(configs)
        self.rows_read = torch.zeros(tables.owners, dtype=torch.int64)
        self.last_version: str | None = None
        self.followed = False
        self.pins: Pins | None = None
        self.under_way = self._none_under_way()
        # Generation that a forked child can't serve.
        self._unpublished: Generation | None = None

    @property
    def generation(self) -> Generation:
        """Returns the generation that the next lookup reads."""
        return self._view.generation

    @property
    def version(self) -> str:
        """Returns the version of the weights that the last batch saw."""
        return self.last_version or self.generation.version

    @property
    @abstractmethod
    def pooled(self) -> bool:
        """Returns whether the module is an EmbeddingBagCollection, not an EmbeddingCollection."""

    def wait_checked(self, check: InputCheck) -> None:
        """Waits until the ids of all batches so far are checked.

        Args:
            check: input check of the module.

        Raises:
            ValueError: one of them had an id that its table has no row for. Each is told once.
        """
        if self.under_way is None:
            return
        self.under_way.wait()
        self.check_earlier(check)

    def check_earlier(self, check: InputCheck) -> None:
        """Raises ValueError if a GPU has found a bad id in an earlier batch, see
        InputCheck.check_earlier.

        Args:
            check: input check of the module.
        """
        if self.under_way is None:
            return
        try:
            check.check_earlier(self.under_way)
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from error

    def registered(self) -> RegisteredTables:
        """Returns the tables that the next lookup of a GPU reads.

        Raises:
            DrainedError: no version serves at the moment.
        """
        return registered_in(self._view)

    @abstractmethod
    def output(self, batch: CheckedBatch) -> DirectEmbeddings:
        """Returns the embeddings of a batch, all from the view that there is when it begins.

        Raises:
            ValueError: see `check_serves`. Or the output is impossible for such a batch.
            DrainedError: no version serves at the moment.
        """

    @abstractmethod
    def live_content(self) -> Content:
        """Returns the content of this rank's bytes in its live weights."""

    def shown_by(self, module: nn.Module, name: str) -> Iterable[tuple[str, torch.Tensor]]:
        """Returns the tensors of a module that show its tables, by name.

        Args:
            module: the module.
            name: its name in the model.
        """
        return module.named_parameters(name)

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """Returns a description of the output. Another process that knows the tables makes the
        same output from it."""

    @abstractmethod
    def _next_view(self, generation: Generation) -> V:
        """Returns what lookups read of a generation, even if it is the one that they read."""

    @abstractmethod
    def _shown(self, view: V) -> _native.TableWindow:
        """Returns the memory that the live weights of this rank show.

        Raises:
            BLSError: it can't be mapped.
        """

    @abstractmethod
    def aside(self, generation: Generation, check: InputCheck) -> "DirectReads[V]":
        """Returns lookups in a generation that nobody serves yet, and which these do not notice.

        Args:
            generation: the generation.
            check: input check of the lookups.
        """

    def _none_under_way(self) -> ForwardsUnderWay | None:
        return None if self.tables.gpu is None else ForwardsUnderWay(self.tables.gpu)

    def _aside(self, view: V, rows_read: torch.Tensor, under_way: ForwardsUnderWay | None) -> Any:
        made = copy.copy(self)
        made.live, made.rank, made.followed, made._unpublished = None, None, True, None
        made.last_version = None
        made.pins = _OnTrial(view.generation)
        made._view, made.rows_read, made.under_way = view, rows_read, under_way
        return made

    def prepare(self, generation: Generation) -> Callable[[], None]:
        """Returns a function that makes this module read `generation`, and its weights show it.

        All steps that may fail are done before it returns, since several modules change together.
        It may be called again if it was interrupted.

        Raises:
            ValueError: writes to the weights would be lost.
        """
        live = self.live
        if live is not None and live.would_lose_writes:
            raise ValueError(self._why_not_written())
        pages, problem = None, ""
        view: V | DrainedView
        if generation.drained_for:
            view = DrainedView(self.where, self.tables, generation)
        else:
            view = self._next_view(generation)
            pages, problem = self._pages_of(view)

        def take() -> None:
            if live is not None and generation.drained_for:
                live.let_go()
            elif live is not None and pages is not None:
                live.move_to(pages)
            elif live is not None:
                live.stay_behind(problem)
            self._view = view
            self._unpublished = None  # it would keep its tables mapped

        return take

    def abandon(self) -> None:
        """Tells other processes that this rank shares its tables anew and publishes here no
        more."""
        # A forked child that shares its tables anew leaves its parent's page as it is.
        if self.live is not None and self.rank is not None and self.tables.process.is_own:
            self.tables.page.abandon(self.rank)

    def show_served(self) -> None:
        """Makes the weights show what lookups read, if they could not be mapped before.

        Raises:
            RendezvousError: they still can't be.
        """
        view = self._view
        if self.live is None or not self.live.behind or isinstance(view, DrainedView):
            return
        pages, problem = self._pages_of(view)
        if pages is None:
            raise RendezvousError(
                f"{self.where}: its weights show an older version than it reads: {problem}"
            )
        self.live.move_to(pages)

    def _pages_of(self, view: V) -> tuple[_native.TableWindow | None, str]:
        """Returns the memory that live weights show, or why there is none. No lookup needs it."""
        if self.live is None:
            return None, ""
        if view.generation.side is not None:
            return None, (
                f"version {view.generation.version!r} is served, but not shown: its rows are "
                "written over by later versions"
            )
        try:
            return self._noted_pages(view), ""
        except BLSError as error:
            version = view.generation.version
            return None, f"version {version!r} is served, but not shown: {error}"

    def _noted_pages(self, view: V) -> _native.TableWindow:
        """Returns the memory that live weights show, and notes that it is held: tensors may keep
        it after the weights have moved on."""
        pages = self._shown(view)
        self.tables.held.add(view.generation.serial, [pages])
        return pages

    def begin_in_child(self) -> None:
        """Makes this the reads of a forked child, whose counts begin at 0. Weights that the parent
        has written to and not published are the parent's alone.

        Raises:
            BLSError: the generation cannot be mapped once more.
        """
        if self.live is not None and self.live.written:
            view = self._next_view(self.generation)
            self.live.move_to(self._noted_pages(view))
            self._view = view
            # Dense weights may have been written to as well, and are in no segment yet.
            self._unpublished = self.generation
        self.rows_read.zero_()

    def _check_child(self) -> None:
        if self.tables.gpu is not None:
            raise ValueError(
                f"{self.where}: process {self.tables.process.pid} has forked this one, where its "
                "GPU can't be used: attach in a process that is started by spawn or forkserver"
            )
        if not self.followed:
            raise ValueError(
                f"{self.where}: this process was forked from process {self.tables.process.pid} and "
                "would not follow new generations: call serving_state(model) there before the "
                "fork, or here"
            )
        if self._unpublished is self.generation:
            raise ValueError(
                f"{self.where}: process {self.tables.process.pid} had written to the weights and "
                "not published them when it forked this process, which serves from the next "
                "generation on: publish them there"
            )

    def pinned(self, generation: Generation) -> object:
        """Returns what keeps the rows of a generation as they are, as long as it is referred to.

        A forward pins its version from its entry to its end. A lookup that comes past the forward
        of the model has nothing else that protects it.

        Raises:
            BLSError: they are written over by now; or this process can't pin them.
        """
        if generation.side is None:
            return None
        pins = self.pins
        if pins is not None:
            serial, pin = pins.held
            if serial == generation.serial:  # as in each forward: a call would take longer
                return pin
        pin = None if pins is None else pins.of(generation)
        if pin is None:
            raise RendezvousError(
                f"{self.where}: the rows of version {generation.version!r} are written over by "
                "later ones: call the model, and not this module by itself"
            )
        return pin

    def keep_until_read(self, pin: object) -> None:
        """Keeps a pin until the GPU, if there is one, has read what was launched by now."""
        if pin is not None and self.under_way is not None:
            self.under_way.keep(pin)

    def check_serves(self) -> None:
        """Raises ValueError if the weights were written to, and lookups do not read that yet. Or
        this is a forked child that can't serve, see docs/guides/pre-fork.md."""
        if not self.tables.process.is_own:
            self._check_child()
        live = self.live
        if live is not None and live.written:
            if live.would_lose_writes:
                raise ValueError(self._why_not_written())
            raise ValueError(
                f"{self.where}: its weights were written to and published, but lookups still read "
                f"version {self.generation.version!r}: wait until all ranks have published"
            )

    def _why_not_written(self) -> str:
        return (
            f"{self.where}: its weights were written to after its tables became version "
            f"{self.generation.version!r}, which lookups go on reading. Publish them"
            f"{self._other_cure}"
        )


def registered_in(view: View) -> RegisteredTables:
    """Returns the tables of a view that a GPU reads.

    Raises:
        DrainedError: there are none at the moment.
    """
    if isinstance(view, DrainedView):
        view.of(None)
    tables = view.generation.registered
    assert tables is not None
    return tables


#: The reads of tables of any kind.
AnyReads = DirectReads[Any]

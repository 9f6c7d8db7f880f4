"""The tables of all ranks, as one module reads them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torchrec.distributed.types import LazyAwaitable
from torchrec.modules.embedding_modules import get_embedding_names_by_table

from torchrec_bls import _native
from torchrec_bls.direct.generation import FeatureLookup, Generation
from torchrec_bls.direct.live_weights import LiveWeights
from torchrec_bls.direct.reads.tables_view import GenerationViews, TablesView
from torchrec_bls.direct.shared_tables import SharedTables
from torchrec_bls.distributed.exchanges.awaitable import ExchangeAwaitable
from torchrec_bls.distributed.inputs.input_check import CheckedBatch
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


class OutputForm(ABC):
    """The form of a module's output.

    Args:
        names: names of the embeddings, in the order of the output.
        kernel_means: tables whose bags are pooled to means when they are looked up.

    Attributes:
        pooled: whether the output is a KeyedTensor, not JaggedTensors by name.
        names: see above.
        kernel_means: see above.
    """

    pooled: ClassVar[bool]

    def __init__(self, names: Iterable[str], kernel_means: Iterable[str]) -> None:
        self.names = list(names)
        self.kernel_means = list(kernel_means)

    @abstractmethod
    def read(self, view: TablesView, batch: CheckedBatch) -> Any:
        """Returns the embeddings of a batch, for whose keys `view` is."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """Returns a description. Another process that knows the tables makes the same form from
        it."""


class DirectReads:
    """The tables that a module reads, in the order of its output. Any number of threads may look
    batches up.

    Args:
        where: name of the module and its rank, for messages.
        tables: tables in shared memory.
        generation: generation that is read.
        live: weights of this rank; None where a process has shared no tables itself.
        rank: rank whose tables this process publishes; None where it only reads. A forked child
            does not publish: see SharedTables.process.
        configs: EmbeddingConfig or EmbeddingBagConfig of each table.
        form: form of the output.

    Attributes:
        where: see above.
        tables: see above.
        live: see above.
        rank: see above.
        configs: see above.
        form: see above.
        rows_read: rows read of each rank's shards, in all batches of this process, int64 [ranks].
        followed: whether a ServedModel follows the versions. One that was made in the parent goes
            on in a forked child.
    """

    def __init__(
        self,
        where: str,
        tables: SharedTables,
        generation: Generation,
        live: LiveWeights | None,
        rank: int | None,
        configs: Sequence[Any],
        form: OutputForm,
    ) -> None:
        self.where = where
        self.tables = tables
        self.live = live
        self.rank = rank
        self.configs = list(configs)
        self.form = form
        self.rows_read = torch.zeros(tables.owners, dtype=torch.int64)
        self.followed = False
        # Generation that a forked child can't serve.
        self._unpublished: Generation | None = None
        # The one attribute that a switch changes. A lookup reads it once.
        self._views = GenerationViews(
            generation,
            partial(_lookups_of, self.configs, form),
            where,
            tables.dtype,
            self.rows_read,
        )

    @property
    def generation(self) -> Generation:
        """Returns the generation that the next lookup reads."""
        return self._views.generation

    def output(self, batch: CheckedBatch) -> DirectEmbeddings:
        """Returns the embeddings of a batch.

        Raises:
            ValueError: see `check_weights`. Or the form is impossible for such a batch. Or this is
                a forked child that can't serve, see docs/guides/pre-fork.md.
        """
        if not self.tables.process.is_own:
            self._check_child()
        self.check_weights()
        view = self._views.of(batch.features.keys())
        return DirectEmbeddings(self.form.read(view, batch), view.generation.version)

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
        views = self._views.next(generation)
        pages, problem = self._pages_of(generation)

        def take() -> None:
            if live is not None and pages is not None:
                live.move_to(pages)
            elif live is not None:
                live.stay_behind(problem)
            self._views = views

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
        if self.live is None or not self.live.behind:
            return
        pages, problem = self._pages_of(self.generation)
        if pages is None:
            raise RendezvousError(
                f"{self.where}: its weights show an older version than it reads: {problem}"
            )
        self.live.move_to(pages)

    def _pages_of(self, generation: Generation) -> tuple[_native.PrivatePages | None, str]:
        """Returns a private view of the rank's tables, or why there is none. No lookup needs it."""
        if self.live is None or self.rank is None:
            return None, ""
        try:
            return _native.PrivatePages(generation.segments[self.rank]), ""
        except BLSError as error:
            return None, f"version {generation.version!r} is served, but not shown: {error}"

    def begin_in_child(self) -> None:
        """Makes this the reads of a forked child, whose counts begin at 0. Weights that the parent
        has written to and not published are the parent's alone.

        Raises:
            BLSError: the generation cannot be mapped once more.
        """
        if self.live is not None and self.rank is not None and self.live.written:
            self.live.move_to(_native.PrivatePages(self.generation.segments[self.rank]))
            # Dense weights may have been written to as well, and are in no segment yet.
            self._unpublished = self.generation
        self.rows_read.zero_()

    def _check_child(self) -> None:
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

    def check_weights(self) -> None:
        """Raises ValueError if the weights were written to, and lookups do not read that yet."""
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
            f"{self.generation.version!r}, which lookups go on reading. Publish them, or shard "
            'with lookup="exchange" to train'
        )


def _lookups_of(
    configs: Sequence[Any], form: OutputForm, keys: Sequence[str]
) -> list[FeatureLookup]:
    """Returns the lookups of a batch with `keys`, in the order of the output."""
    looked_up = {
        name: (table, feature)
        for table, names in zip(configs, get_embedding_names_by_table(configs), strict=True)
        for name, feature in zip(names, table.feature_names, strict=True)
    }
    places = {key: place for place, key in reversed(list(enumerate(keys)))}
    kernel_means = set(form.kernel_means)
    column = 0
    lookups = []
    for name in form.names:
        table, feature = looked_up[name]
        means = table.name in kernel_means
        lookups.append(FeatureLookup(places[feature], table.name, column, means))
        column += table.embedding_dim
    return lookups

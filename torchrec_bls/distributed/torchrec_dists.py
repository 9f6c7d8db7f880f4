"""The dists of a module that TorchRec has sharded: TorchRec's own, around bounded-lag exchanges."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_bls.direct.reads.float_reads import OutputForm
from torchrec_bls.distributed.codec_config import finds_unique
from torchrec_bls.distributed.data_parallel import LocalIdsDist, exchanged
from torchrec_bls.distributed.inputs.equal_rows import UniqueRows
from torchrec_bls.distributed.inputs.input_check import CheckedBatch
from torchrec_bls.distributed.inputs.input_dist import BoundedLagIdsDist
from torchrec_bls.distributed.inputs.routes import Route, RoutedIdsAwaitable
from torchrec_bls.distributed.module_state import ModuleState
from torchrec_bls.distributed.outputs.lookup_tables import LookupTables
from torchrec_bls.distributed.outputs.table_codecs import CodecPlan, plan_codecs

_FIRST_BATCH_MARK = "_has_uninitialized_input_dist"


class TorchRecDists(ABC):
    """Has TorchRec's module do what is no exchange, and goes past it where it would only copy.

    Args:
        module: TorchRec's sharded module, whose dists are bounded-lag ones.
        state: state of the module.

    Attributes:
        module: see above.
    """

    #: TorchRec's class of the module.
    _theirs: ClassVar[Any]

    def __init__(self, module: Any, state: ModuleState) -> None:
        self.module = module
        self._state = state
        # Ways past TorchRec's input dist; None before the first batch, and where there are none.
        self._routes: list[Route] | None = None
        # Keys that TorchRec's input dists are made for; None before the first batch.
        self._keys: list[str] | None = None

    def post(self, ctx: Any, batch: CheckedBatch) -> Awaitable[Any]:
        """See Dists."""
        features: KeyedJaggedTensor = batch.features
        if batch.varying is not None and features.stride() > 0:
            features = batch.varying  # TorchRec cannot do batch sizes per key that are all 0
        keys = features.keys()
        if keys != self._keys:
            self._forget_input_dists()
            self._keys = list(keys)
        if self._routes is not None and features is batch.features:
            with torch.no_grad():
                return self._post_along_routes(self._routes, ctx, batch)
        awaitable: Any = self._theirs.input_dist(self.module, ctx, self._kept(features))
        for ids, sharding_context in zip(awaitable.awaitables, ctx.sharding_contexts, strict=True):
            ids.bind(sharding_context)
        # TorchRec has made its input dists by now.
        self._routes = self._plan_routes(keys)
        return RoutedIdsAwaitable(awaitable.awaitables)  # TorchRec's holds the context

    def look_up(self, ctx: Any, ids: Any) -> LazyAwaitable[Any]:
        """See Dists."""
        self._refuse_hooks()
        embeddings = self._embeddings(ctx, ids)
        if torch.is_grad_enabled() and self.module.training:
            self._state.iterations += 1
        return embeddings

    def _post_along_routes(
        self, routes: list[Route], ctx: Any, batch: CheckedBatch
    ) -> RoutedIdsAwaitable:
        awaitables = []
        for route in routes:
            awaitable = route.post(batch.features)
            context = self._sharding_context(route, batch.features)
            awaitable.bind(context)
            ctx.sharding_contexts.append(context)
            awaitables.append(awaitable)
        return RoutedIdsAwaitable(awaitables)

    def _forget_input_dists(self) -> None:
        """Makes TorchRec make its input dists again, for other keys. Until the first batch with
        samples, batches may differ in keys."""
        module = self.module
        module._input_dists = []
        module._feature_splits = []
        module._features_order = []
        module._has_features_permute = True
        module._has_uninitialized_input_dist = True
        self._routes = None

    def _kept(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns `features` for TorchRec's input_dist, whose context may refer to them for longer
        than their memory is this module's."""
        return features

    def _may_skip_lookups(self) -> bool:
        """Returns whether nothing but the exchange uses the results of the lookups."""
        codecs = self._state.exchanges.config.codecs
        return (
            not torch.is_grad_enabled()
            and (codecs is None or codecs.non_finite == "keep")
            and self.module.post_lookup_tracker_fn is None
            and self.module.post_odist_tracker_fn is None
        )

    def _refuse_hooks(self) -> None:
        codecs = self._state.exchanges.config.codecs
        if codecs is None or not finds_unique(codecs):
            return
        if any(tables.has_hooks() for tables in self.lookup_tables):
            raise ValueError(
                f"{self._state.where}: a hook of its lookups may give equal ids different rows, of "
                "which one would travel: remove the hook, or leave CodecConfig's unique off"
            )

    @property
    def tables(self) -> list[Any]:
        """Returns EmbeddingConfig or EmbeddingBagConfig of each table."""
        return self._state.tables

    @property
    def lookup_tables(self) -> list[LookupTables]:
        """Returns the tables of TorchRec's lookups."""
        if self._state.lookup_tables is None:
            self._state.lookup_tables = [LookupTables(lookup) for lookup in self.module._lookups]
        return self._state.lookup_tables

    @property
    @abstractmethod
    def only_read(self) -> bool:
        """Returns whether the lookups do nothing but read tables."""

    @abstractmethod
    def output_form(self) -> OutputForm:
        """Returns the form of the output."""

    @abstractmethod
    def _plan_routes(self, keys: list[str]) -> list[Route] | None:
        """Returns how batches with `keys` may go past TorchRec's input_dist, or None."""

    @abstractmethod
    def _sharding_context(self, route: Route, features: KeyedJaggedTensor) -> Any:
        """Returns TorchRec's context of a sharding whose ids were just posted."""

    @abstractmethod
    def _embeddings(self, ctx: Any, ids: Any) -> LazyAwaitable[Any]:
        """Does the work of TorchRec's compute_and_output_dist, and returns its result."""


def swap_ids_dists(
    state: ModuleState,
    shardings: Iterable[tuple[str, Any]],
    input_dists: list[nn.Module],
    pooled: bool,
) -> None:
    """Makes the input dists of a module exchange by bounded lag, or not at all.

    Args:
        state: state of the module.
        shardings: type of each sharding, and TorchRec's sharding.
        input_dists: input dists of the shardings. The outer ones stay: TorchRec checks their
            classes and attributes.
        pooled: whether the module pools.
    """
    exchanges = state.exchanges
    for index, (sharding_type, sharding) in enumerate(shardings):
        if not exchanged([sharding_type]):
            input_dists[index] = LocalIdsDist()
            continue
        input_dist = input_dists[index]
        theirs: Any = input_dist._dist
        input_dist._dist = BoundedLagIdsDist(
            exchanges.group,
            theirs._splits,
            theirs._stagger,
            exchanges.of(sharding_type, "ids"),
            exchanges.slot_growth(sharding_type),
            state.calls,
            exchanges.config.codecs is not None,
            _unique_rows(state, sharding, pooled),
        )


def codec_plan(state: ModuleState, sharding: Any) -> CodecPlan:
    """Returns the codecs of the tables of one of TorchRec's shardings, where there are codecs."""
    codecs = state.exchanges.config.codecs
    assert codecs is not None
    return plan_codecs(codecs, sharding, state.input_check.is_weighted)


def _unique_rows(state: ModuleState, sharding: Any, pooled: bool) -> UniqueRows | None:
    if state.exchanges.config.codecs is None:
        return None
    wanted = codec_plan(state, sharding).unique
    return None if wanted is None else UniqueRows(pooled, wanted)


class FirstBatchMark:
    """TorchRec's mark of a module that has had no batch yet, as an attribute of the class.

    It refuses wrappers that exchange the ids in the module's place: embeddings go back by the
    layout that the module's own input dist leaves.
    """

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        """Returns the mark, or itself for the class. TorchRec's pipelines want none. Direct reads
        have no input dists that could lack it."""
        if module is None:
            return self
        return vars(module)[_FIRST_BATCH_MARK] and not module.reads_directly

    def __set__(self, module: Any, value: bool) -> None:
        """Sets the mark.

        Raises:
            ValueError: the mark is removed without a batch. TorchRec's ManagedCollision modules do
                that: they have their own input dists, and call only `compute` and `output_dist`.
        """
        if not value and not module._input_dists:
            raise ValueError(
                f"{type(module).__name__} is sharded inside of a ManagedCollision module, which "
                "exchanges ids itself, in steps that have no bound and leave no layout for the way "
                "back: give ManagedCollisionEmbeddingCollectionSharder and "
                "ManagedCollisionEmbeddingBagCollectionSharder TorchRec's own sharders"
            )
        vars(module)[_FIRST_BATCH_MARK] = value

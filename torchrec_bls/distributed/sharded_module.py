"""The common part of the bounded-lag modules that TorchRec shards: lookups, codecs and routes."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import Awaitable, ParameterSharding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_bls.direct.reads.direct_reads import UnsentBatch
from torchrec_bls.distributed.config import BLSConfig, name_of_module
from torchrec_bls.distributed.data_parallel import LocalIdsDist, exchanged
from torchrec_bls.distributed.direct_module import DirectModule
from torchrec_bls.distributed.inputs.batch_note import IdsNote
from torchrec_bls.distributed.inputs.routes import Route, RoutedIdsAwaitable
from torchrec_bls.distributed.inputs.equal_rows import UniqueRows
from torchrec_bls.distributed.inputs.foreign_input_dist import OwnInputDist
from torchrec_bls.distributed.inputs.input_check import CheckedBatch
from torchrec_bls.distributed.inputs.input_dist import BoundedLagIdsDist
from torchrec_bls.distributed.outputs.inference_mode import outside_inference_mode
from torchrec_bls.distributed.outputs.lookup_tables import LookupTables
from torchrec_bls.distributed.outputs.table_codecs import CodecPlan, plan_codecs


class BoundedLagModule(DirectModule, OwnInputDist):
    """Mix-in of the modules that TorchRec shards and trains."""

    def _init_bounded_lag(
        self,
        config: BLSConfig,
        group: dist.ProcessGroup,
        module_fqn: str | None,
        tables: Sequence[Any],
        params: Mapping[str, ParameterSharding],
        is_weighted: bool,
    ) -> None:
        if config.codecs is not None:
            config.codecs.check(tables)
            if not config.codecs.encode_any(tables):
                config = replace(config, codecs=None)
        name = name_of_module(config, module_fqn or type(self).__name__)
        self._init_exchanges(config, group, name, tables, params, is_weighted)

    def _swap_ids_dists(
        self, shardings: Iterable[tuple[str, Any]], input_dists: list[nn.Module], pooled: bool
    ) -> None:
        # The outer dist stays: TorchRec checks its class and its attributes of bucketizing.
        exchanges = self._bls.exchanges
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
                lambda: self._bls.note,
                exchanges.config.codecs is not None,
                self._unique_rows(sharding, pooled),
            )

    def _codec_plan(self, sharding: Any) -> CodecPlan:
        codecs = self._bls.exchanges.config.codecs
        assert codecs is not None
        return plan_codecs(codecs, sharding, self._bls.input_check.is_weighted)

    def _unique_rows(self, sharding: Any, pooled: bool) -> UniqueRows | None:
        if self._bls.exchanges.config.codecs is None:
            return None
        wanted = self._codec_plan(sharding).unique
        return None if wanted is None else UniqueRows(pooled, wanted)

    def input_dist(self, ctx: Any, features: object) -> Awaitable[Any]:
        """Posts the ids of a batch; see TorchRec.

        A batch that does not fit the module does not stop the others. In inference the other ranks
        get their rows, and this rank raises ValueError where the embeddings are used. Under
        autograd all ranks raise when they wait for the ids: ValueError here, BatchRefusedError on
        the others.

        Raises:
            ValueError: a pipeline or another thread is calling the module. Nothing is posted.
        """
        if self.agree_on_lookup():
            return self._direct_input(ctx, features)
        self.callers.enter(self)
        try:
            batch = self.check_input(features)
        except ValueError as error:
            if torch.is_grad_enabled() and self.bound == 0:
                return self.post_ids(ctx, self.nothing(), IdsNote(refusal=str(error)))
            return self._post_nothing(ctx, error)
        return self.post_ids(ctx, batch)

    def _checked(self, features: object) -> CheckedBatch:
        if self.bound > 0 and torch.is_grad_enabled():
            raise ValueError(
                f"bound is {self.bound} and autograd is on: gradients of up to {self.bound} "
                "iterations ago would update rows that later lookups have read already. Use "
                "torch.no_grad() for inference, or bound 0 for training"
            )
        return super()._checked(features)

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Looks up and posts the embeddings; see TorchRec."""
        if isinstance(input, UnsentBatch):
            return self._direct_output(ctx, input.batch)
        if self.reads_directly:
            batch = ctx.bls_unsent
            for processed in input:  # of a FeatureProcessedEmbeddingBagCollection, one at most
                batch = self._bls.input_check.check_processed(processed, batch)
            return self._direct_output(ctx, batch)
        return super().compute_and_output_dist(ctx, input)

    @outside_inference_mode
    def _post_embeddings(self, ctx: Any, input: Any) -> Any:
        with self._all_or_none("lookup"):
            self._refuse_hooks()
        embeddings = super()._post_embeddings(ctx, input)
        if torch.is_grad_enabled() and self.training:  # type: ignore[attr-defined]
            self._bls.iterations += 1
        return embeddings

    def _post_ids(self, ctx: Any, batch: CheckedBatch) -> Awaitable[Any]:
        features: KeyedJaggedTensor = batch.features
        if batch.varying is not None and features.stride() > 0:
            features = batch.varying  # TorchRec cannot do batch sizes per key that are all 0
        keys = features.keys()
        if keys != self._bls.dist_keys:
            self._forget_input_dists()
            self._bls.dist_keys = list(keys)
        if self._bls.routes is not None and features is batch.features:
            with torch.no_grad():
                return self._post_along_routes(self._bls.routes, ctx, batch)
        awaitable = super().input_dist(ctx, self._kept(features))  # type: ignore[misc]
        for ids, sharding_context in zip(awaitable.awaitables, ctx.sharding_contexts, strict=True):
            ids.bind(sharding_context)
        # TorchRec has made its input dists by now.
        self._bls.routes = self._plan_routes(keys)
        return awaitable

    def _kept(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns `features` for TorchRec's input_dist, whose context may refer to them for longer
        than their memory is this module's."""
        return features

    def _forget_input_dists(self) -> None:
        """Makes TorchRec make its input dists again, for other keys. Until the first batch with
        samples, batches may differ in keys."""
        module: Any = self  # for TorchRec's attributes
        module._input_dists = []
        module._feature_splits = []
        module._features_order = []
        module._has_features_permute = True
        module._has_uninitialized_input_dist = True
        self._bls.routes = None

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

    @abstractmethod
    def _plan_routes(self, keys: list[str]) -> list[Route] | None:
        """Returns how batches with `keys` may go past TorchRec's input_dist, or None."""

    @abstractmethod
    def _sharding_context(self, route: Route, features: KeyedJaggedTensor) -> Any:
        """Returns TorchRec's context of a sharding whose ids were just posted."""

    def _may_skip_lookups(self) -> bool:
        """Returns whether nothing but the exchange uses the results of the lookups."""
        module: Any = self  # for TorchRec's attributes
        codecs = self._bls.exchanges.config.codecs
        return (
            not torch.is_grad_enabled()
            and (codecs is None or codecs.non_finite == "keep")
            and module.post_lookup_tracker_fn is None
            and module.post_odist_tracker_fn is None
        )

    def _refuse_hooks(self) -> None:
        codecs = self._bls.exchanges.config.codecs
        if codecs is None or not codecs.finds_unique:
            return
        if any(tables.has_hooks() for tables in self._lookup_tables()):
            raise ValueError(
                f"{self._where}: a hook of its lookups may give equal ids different rows, of which "
                "one would travel: remove the hook, or leave CodecConfig's unique off"
            )

    def _lookup_tables(self) -> list[LookupTables]:
        if self._bls.lookup_tables is None:
            module: Any = self
            self._bls.lookup_tables = [LookupTables(lookup) for lookup in module._lookups]
        return self._bls.lookup_tables

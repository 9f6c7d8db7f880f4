"""What the bounded-lag sharded modules have in common: their exchanges and the checks of inputs."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.compiler import is_compiling
from torchrec.distributed.types import Awaitable, LazyAwaitable, ParameterSharding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_bls.collective.channel import BoundedLagChannel
from torchrec_bls.distributed.config import BLSConfig
from torchrec_bls.distributed.data_parallel import LocalIdsDist, exchanged
from torchrec_bls.distributed.direct_module import DirectModule
from torchrec_bls.distributed.direct_reads import UnsentBatch
from torchrec_bls.distributed.exchanges.plan_agreement import Agreement, terms_of
from torchrec_bls.distributed.inputs.batch_note import IdsNote
from torchrec_bls.distributed.inputs.direct_input import Route, RoutedIdsAwaitable
from torchrec_bls.distributed.inputs.equal_rows import UniqueRows
from torchrec_bls.distributed.inputs.foreign_input_dist import OwnInputDist
from torchrec_bls.distributed.inputs.input_check import CheckedBatch, InputCheck
from torchrec_bls.distributed.inputs.input_dist import BoundedLagIdsDist, IdsLayout
from torchrec_bls.distributed.inputs.refused_batches import (
    Calls,
    RefusedEmbeddings,
    take_part_in_the_rest,
)
from torchrec_bls.distributed.module_state import NO_NOTE, ModuleExchanges, ModuleState
from torchrec_bls.distributed.outputs.inference_mode import outside_inference_mode
from torchrec_bls.distributed.outputs.lookup_tables import LookupTables
from torchrec_bls.distributed.outputs.table_codecs import CodecPlan, plan_codecs
from torchrec_bls.errors import BLSError, named


class _AllOrNone:
    """See BoundedLagModule. A generator takes longer to enter and leave."""

    def __init__(self, module: "BoundedLagModule", what: str) -> None:
        self._module = module
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        # What is a BLSError is known to all ranks.
        if error is not None and not isinstance(error, BLSError):
            self._module.fail(f"{self._what} failed: {named(error)}")


class BoundedLagModule(DirectModule, OwnInputDist):
    """Mix-in of the sharded modules: owns their exchanges and checks what goes in."""

    _sharding_types: list[str]  # TorchRec's

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
        name = module_fqn or type(self).__name__
        exchanges = ModuleExchanges(group, config, name, self.fail)
        self._bls = ModuleState(
            exchanges,
            Agreement(group, name, exchanges.deadline, terms_of(config, tables, params)),
            InputCheck(name, tables, is_weighted, config.bad_ids),
            list(tables),
        )
        self._bls.forget_lookup()
        self.calls = Calls()

    @property
    def bound(self) -> int:
        """Iterations that ranks may be apart."""
        return self._bls.exchanges.config.bound

    def channels(self) -> dict[str, BoundedLagChannel]:
        """Returns the channels made so far, by name."""
        return self._bls.exchanges.channels()

    @property
    def under_way(self) -> bool:
        """Whether exchanges of this rank are posted and not waited for."""
        return self._bls.exchanges.under_way

    def fail(self, reason: str) -> None:
        """Fails the other ranks' waits for this one: they raise errors that quote `reason`."""
        if not self._bls.agreement.reached:
            self._bls.agreement.fail(reason)
            return
        self._bls.exchanges.fail(reason, exchanged(self._sharding_types))

    def _swap_ids_dists(
        self, shardings: Iterable[tuple[str, Any]], input_dists: list[nn.Module], pooled: bool
    ) -> None:
        # The outer dist stays: TorchRec asks for its class and for what it keeps of bucketizing.
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

    def forward(self, *input: Any, **kwargs: Any) -> Any:
        """See TorchRec; torch.compile breaks its graph here."""
        # Asked before, since a disabled function costs microseconds without a compiler, too.
        if is_compiling():
            return self._forward_uncompiled(*input, **kwargs)
        return super().forward(*input, **kwargs)  # type: ignore[misc]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward_uncompiled(self, *input: Any, **kwargs: Any) -> Any:
        return super().forward(*input, **kwargs)  # type: ignore[misc]

    def input_dist(self, ctx: Any, features: object) -> Awaitable[Any]:
        """Posts the ids of a batch; see TorchRec.

        A batch that does not fit the module keeps nobody from going on. In inference the other
        ranks get their rows, and this rank raises ValueError where the embeddings are used. Under
        autograd all ranks raise when they wait for the ids: ValueError here, BatchRefusedError on
        the others.
        """
        if self.agree_on_lookup():
            return self._direct_input(ctx, features)
        try:
            batch, refusal = self.check_input(features), None
        except ValueError as error:
            batch, refusal = self.nothing(), error
        if refusal is None:
            return self.post_ids(ctx, batch)
        if torch.is_grad_enabled() and self.bound == 0:
            return self.post_ids(ctx, batch, IdsNote(refusal=str(refusal)))
        ctx.bls_refusal = refusal
        with torch.no_grad():
            return self.post_ids(ctx, batch)

    def check_input(self, features: object) -> CheckedBatch:
        """Returns `features` as `post_ids` takes them. Tells the other ranks nothing.

        Raises:
            ValueError: they do not fit the module.
        """
        exchanges = self._bls.exchanges
        where = f"{exchanges.name} on rank {exchanges.group.rank()}"
        if self.bound > 0 and torch.is_grad_enabled():
            raise ValueError(
                f"{where}: bound is {self.bound} and autograd is on: gradients of up to "
                f"{self.bound} iterations ago would update rows that later lookups have read "
                "already. Use torch.no_grad() for inference, or bound 0 for training"
            )
        known = self._bls.input_check.keys
        try:
            batch = self._bls.input_check.check(features)
        except Exception as error:  # whatever a request holds, it is this request's fault
            raise ValueError(f"{where}: {error}") from error
        if known is None:
            self._forget_input_dists()
        return batch

    def nothing(self) -> CheckedBatch:
        """Returns a batch without samples, with which a rank that has none takes part."""
        return self._bls.input_check.nothing()

    @staticmethod
    def layout_of(ctx: Any) -> IdsLayout | None:
        """Returns how the ids of a batch came, once they are waited for; None if none are sent.

        Args:
            ctx: of the batch.
        """
        layouts = (getattr(each, "bls_ids_layout", None) for each in ctx.sharding_contexts)
        return next((layout for layout in layouts if layout is not None), None)

    @property
    def replaced_ids(self) -> int:
        """Ids that row 0 was looked up for, as BLSConfig(bad_ids="row0") has it."""
        return self._bls.input_check.replaced_ids

    @property
    def refused_batches(self) -> int:
        """Batches of this rank that did not fit the module: an id out of range, a wrong key."""
        return self._bls.input_check.refused_batches

    def post_ids(self, ctx: Any, batch: CheckedBatch, note: IdsNote = NO_NOTE) -> Awaitable[Any]:
        """Posts a batch, and `note` to every rank; the first call makes channels, collectively.

        Args:
            ctx: of `create_context`.
            batch: of `check_input` or `nothing`.
            note: what to tell along with the ids.
        """
        self._bls.exchanges.deadline.training = torch.is_grad_enabled()
        self._bls.agreement.reach()
        self._bls.note = note
        self.calls.note()
        with self._all_or_none("posting ids"):
            return self._post_ids(ctx, batch)

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Looks up and posts the embeddings; see TorchRec."""
        if isinstance(input, UnsentBatch):
            return self._direct_output(ctx, input.batch)
        return self._post_embeddings(ctx, input)

    @outside_inference_mode
    def _post_embeddings(self, ctx: Any, input: Any) -> Any:
        with self._all_or_none("lookup"):
            self._refuse_hooks()
            embeddings = self._look_up(ctx, input)
        if torch.is_grad_enabled() and self.training:  # type: ignore[attr-defined]
            self._bls.iterations += 1
        refusal = getattr(ctx, "bls_refusal", None)
        if refusal is None:
            return embeddings
        return RefusedEmbeddings(embeddings, refusal, partial(take_part_in_the_rest, self))

    def _all_or_none(self, what: str) -> "_AllOrNone":
        """Fails all ranks for whatever ends this rank's part between the messages of a batch."""
        return _AllOrNone(self, what)

    @abstractmethod
    def _look_up(self, ctx: Any, input: Any) -> LazyAwaitable[Any]:
        """Returns what TorchRec's compute_and_output_dist does."""

    def _post_ids(self, ctx: Any, batch: CheckedBatch) -> Awaitable[Any]:
        features: KeyedJaggedTensor = batch.features
        if batch.varying is not None and features.stride() > 0:
            features = batch.varying  # TorchRec cannot do batch sizes per key that are all 0
        if self._bls.routes is not None and features is batch.features:
            with torch.no_grad():
                return self._post_along_routes(self._bls.routes, ctx, features, batch.counts)
        awaitable = super().input_dist(ctx, features)  # type: ignore[misc]
        for ids, sharding_context in zip(awaitable.awaitables, ctx.sharding_contexts, strict=True):
            ids.bind(sharding_context)
        # TorchRec has made its input dists by now.
        self._bls.routes = self._plan_routes(features.keys())
        return awaitable

    def _forget_input_dists(self) -> None:
        """Has TorchRec make its input dists anew for the next batch: those made for batches without
        samples, before the first one with keys, are for any order of keys."""
        module: Any = self  # TorchRec's attributes
        module._input_dists = []
        module._feature_splits = []
        module._features_order = []
        module._has_features_permute = True
        module._has_uninitialized_input_dist = True
        self._bls.routes = None

    def prepare(self, sample: KeyedJaggedTensor, largest_batch: int | None = None) -> None:
        """Makes the channels of inference before traffic, collectively, by looking `sample` up.

        Args:
            sample: a batch of usual content, of this rank.
            largest_batch: that a rank will ever have; slots get room for it. None: the config's
                expected_batch.

        Raises:
            ValueError: `sample` does not fit the module.
        """
        if largest_batch is not None:
            self.expect_batch(largest_batch)
        with torch.no_grad():
            self(sample).wait()  # type: ignore[operator]

    def expect_batch(self, largest_batch: int) -> None:
        """Says how large batches get, before the first one. Raises ValueError afterwards."""
        self._bls.exchanges.expect_batch(largest_batch)

    def _post_along_routes(
        self, routes: list[Route], ctx: Any, features: KeyedJaggedTensor, counts: list[int]
    ) -> RoutedIdsAwaitable:
        awaitables = []
        for route in routes:
            awaitable = route.post(features)
            context = self._sharding_context(route, features)
            awaitable.bind(context)
            ctx.sharding_contexts.append(context)
            awaitables.append(awaitable)
        ctx.bls_counts = counts
        return RoutedIdsAwaitable(awaitables)

    @abstractmethod
    def _plan_routes(self, keys: list[str]) -> list[Route] | None:
        """Returns how batches with `keys` may go past TorchRec's input_dist, or None."""

    @abstractmethod
    def _sharding_context(self, route: Route, features: KeyedJaggedTensor) -> Any:
        """Returns TorchRec's context of a sharding whose ids were just posted."""

    def _may_skip_lookups(self) -> bool:
        """Whether nothing but the exchange asks for the results of the lookups."""
        module: Any = self  # TorchRec's attributes
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
                f"{self._bls.exchanges.name} on rank {self._bls.exchanges.group.rank()}: a hook of "
                "its lookups may give equal ids different rows, of which one would travel: remove "
                "the hook, or leave CodecConfig's unique off"
            )

    def _lookup_tables(self) -> list[LookupTables]:
        if self._bls.lookup_tables is None:
            module: Any = self
            self._bls.lookup_tables = [LookupTables(lookup) for lookup in module._lookups]
        return self._bls.lookup_tables

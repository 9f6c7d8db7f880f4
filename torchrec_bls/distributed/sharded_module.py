"""What the bounded-lag sharded modules have in common: their exchanges and the checks of inputs."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import Awaitable, LazyAwaitable, ParameterSharding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_bls.collective.channel import BoundedLagChannel
from torchrec_bls.distributed.config import BLSConfig, Deadline
from torchrec_bls.distributed.data_parallel import LocalIdsDist, exchanged
from torchrec_bls.distributed.exchange import Exchange
from torchrec_bls.distributed.inputs.batch_note import IdsNote
from torchrec_bls.distributed.inputs.direct_input import Route, RoutedIdsAwaitable
from torchrec_bls.distributed.inputs.foreign_input_dist import OwnInputDist
from torchrec_bls.distributed.inputs.input_check import CheckedBatch, InputCheck
from torchrec_bls.distributed.inputs.input_dist import BoundedLagIdsDist, IdsLayout
from torchrec_bls.distributed.inputs.refused_batches import (
    Calls,
    RefusedEmbeddings,
    take_part_in_the_rest,
)
from torchrec_bls.distributed.outputs.inference_mode import outside_inference_mode
from torchrec_bls.distributed.outputs.lookup_tables import LookupTables
from torchrec_bls.distributed.plan_agreement import Agreement, terms_of
from torchrec_bls.distributed.slot_growth import SlotGrowth
from torchrec_bls.errors import BLSError, named

_DIRECTIONS = ("ids", "embeddings", "gradients")
_NO_NOTE = IdsNote()


class BoundedLagModule(OwnInputDist):
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
        self._bls_config = config
        self._bls_group = group
        self._bls_name = module_fqn or type(self).__name__
        terms = terms_of(config, tables, params)
        self._bls_deadline = Deadline(config.deadline, group)
        self._bls_agreement = Agreement(group, self._bls_name, self._bls_deadline, terms)
        self._bls_exchanges: dict[str, Exchange] = {}
        self._bls_growth: dict[str, SlotGrowth] = {}
        self._bls_input = InputCheck(self._bls_name, tables, is_weighted, config.bad_ids)
        self._bls_note = _NO_NOTE
        self.calls = Calls()
        self._bls_routes: list[Route] | None = None
        self._bls_tables: list[LookupTables] | None = None

    @property
    def bound(self) -> int:
        """Iterations that ranks may be apart."""
        return self._bls_config.bound

    def channels(self) -> dict[str, BoundedLagChannel]:
        """Returns the channels made so far, by name."""
        return {
            exchange.name: exchange.channel
            for exchange in self._bls_exchanges.values()
            if exchange.channel is not None
        }

    @property
    def under_way(self) -> bool:
        """Whether exchanges of this rank are posted and not waited for."""
        return any(exchange.under_way for exchange in self._bls_exchanges.values())

    def forget_plan(self, agreement: Agreement) -> None:
        """Derives nothing more from the plan so far, and compares `agreement` at the next batch."""
        self._bls_agreement = agreement
        self._bls_routes = None
        self._bls_tables = None

    def fail(self, reason: str) -> None:
        """Fails the other ranks' waits for this one: they raise errors that quote `reason`."""
        if not self._bls_agreement.reached:
            self._bls_agreement.fail(reason)
            return
        # The other ranks may be at their first batch, with which these exchanges are made.
        for sharding_type in exchanged(self._sharding_types):
            self._exchange(sharding_type, "ids")
        # Those with a channel first: to tell of the others takes a store, which may be slow.
        for exchange in sorted(self._bls_exchanges.values(), key=lambda each: each.channel is None):
            exchange.fail(reason)

    def _exchange(self, sharding_type: str, direction: str) -> Exchange:
        """Returns the exchange of a direction: "ids", "embeddings" or "gradients"."""
        name = f"{self._bls_name}.{sharding_type}.{direction}"
        return self._bls_exchanges.setdefault(
            name,
            Exchange(self._bls_group, self._bls_config, name, self.fail, self._bls_deadline),
        )

    def _slot_growth(self, sharding_type: str) -> SlotGrowth:
        if sharding_type not in self._bls_growth:
            exchanges = [self._exchange(sharding_type, direction) for direction in _DIRECTIONS]
            self._bls_growth[sharding_type] = SlotGrowth(self.bound, exchanges)
        return self._bls_growth[sharding_type]

    def _swap_ids_dists(self, sharding_types: Iterable[str], input_dists: list[nn.Module]) -> None:
        # The outer dist stays: TorchRec asks for its class and for what it keeps of bucketizing.
        for index, sharding_type in enumerate(sharding_types):
            if not exchanged([sharding_type]):
                input_dists[index] = LocalIdsDist()
                continue
            input_dist = input_dists[index]
            theirs: Any = input_dist._dist
            input_dist._dist = BoundedLagIdsDist(
                self._bls_group,
                theirs._splits,
                theirs._stagger,
                self._exchange(sharding_type, "ids"),
                self._slot_growth(sharding_type),
                lambda: self._bls_note,
                self._bls_config.codecs is not None,
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *input: Any, **kwargs: Any) -> Any:
        """See TorchRec; torch.compile breaks its graph here."""
        return super().forward(*input, **kwargs)  # type: ignore[misc]

    def input_dist(self, ctx: Any, features: object) -> Awaitable[Any]:
        """Posts the ids of a batch; see TorchRec.

        A batch that does not fit the module keeps nobody from going on. In inference the other
        ranks get their rows, and this rank raises ValueError where the embeddings are used. Under
        autograd all ranks raise when they wait for the ids: ValueError here, BatchRefusedError on
        the others.
        """
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
        where = f"{self._bls_name} on rank {self._bls_group.rank()}"
        if self.bound > 0 and torch.is_grad_enabled():
            raise ValueError(
                f"{where}: bound is {self.bound} and autograd is on: gradients of up to "
                f"{self.bound} iterations ago would update rows that later lookups have read "
                "already. Use torch.no_grad() for inference, or bound 0 for training"
            )
        known = self._bls_input.keys
        try:
            batch = self._bls_input.check(features)
        except Exception as error:  # whatever a request holds, it is this request's fault
            raise ValueError(f"{where}: {error}") from error
        if known is None:
            self._forget_input_dists()
        return batch

    def nothing(self) -> CheckedBatch:
        """Returns a batch without samples, with which a rank that has none takes part."""
        return self._bls_input.nothing()

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
        return self._bls_input.replaced_ids

    def post_ids(self, ctx: Any, batch: CheckedBatch, note: IdsNote = _NO_NOTE) -> Awaitable[Any]:
        """Posts a batch, and `note` to every rank; the first call makes channels, collectively.

        Args:
            ctx: of `create_context`.
            batch: of `check_input` or `nothing`.
            note: what to tell along with the ids.
        """
        self._bls_deadline.training = torch.is_grad_enabled()
        self._bls_agreement.reach()
        self._bls_note = note
        self.calls.note()
        with self._all_or_none("posting ids"):
            return self._post_ids(ctx, batch)

    @outside_inference_mode
    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Looks up and posts the embeddings; see TorchRec."""
        with self._all_or_none("lookup"):
            embeddings = self._look_up(ctx, input)
        refusal = getattr(ctx, "bls_refusal", None)
        if refusal is None:
            return embeddings
        return RefusedEmbeddings(embeddings, refusal, partial(take_part_in_the_rest, self))

    @contextmanager
    def _all_or_none(self, what: str) -> Iterator[None]:
        """Fails all ranks for whatever ends this rank's part between the messages of a batch."""
        try:
            yield
        except BLSError:
            raise  # known to all ranks
        except BaseException as error:
            self.fail(f"{what} failed: {named(error)}")
            raise

    @abstractmethod
    def _look_up(self, ctx: Any, input: Any) -> LazyAwaitable[Any]:
        """Returns what TorchRec's compute_and_output_dist does."""

    def _post_ids(self, ctx: Any, batch: CheckedBatch) -> Awaitable[Any]:
        features: KeyedJaggedTensor = batch.features
        if batch.varying is not None and features.stride() > 0:
            features = batch.varying  # TorchRec cannot do batch sizes per key that are all 0
        if self._bls_routes is not None and features is batch.features:
            with torch.no_grad():
                return self._post_along_routes(self._bls_routes, ctx, features, batch.counts)
        awaitable = super().input_dist(ctx, features)  # type: ignore[misc]
        for ids, sharding_context in zip(awaitable.awaitables, ctx.sharding_contexts, strict=True):
            ids.bind(sharding_context)
        # TorchRec has made its input dists by now.
        self._bls_routes = self._plan_routes(features.keys())
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
        self._bls_routes = None

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
        if self.channels():
            raise ValueError(
                f"{self._bls_name}: its channels are made already: say how large batches get "
                "before the first one"
            )
        if largest_batch < 1:
            raise ValueError(f"largest_batch is {largest_batch}, but must be positive")
        self._bls_config = replace(self._bls_config, expected_batch=largest_batch)
        for exchange in self._bls_exchanges.values():
            exchange.expected_batch = largest_batch

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
        return (
            not torch.is_grad_enabled()
            and self._bls_config.codecs is None
            and module.post_lookup_tracker_fn is None
            and module.post_odist_tracker_fn is None
        )

    def _lookup_tables(self) -> list[LookupTables]:
        if self._bls_tables is None:
            module: Any = self
            self._bls_tables = [LookupTables(lookup) for lookup in module._lookups]
        return self._bls_tables

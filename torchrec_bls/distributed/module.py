"""What the bounded-lag sharded modules have in common: their exchanges and the checks of inputs."""

import warnings
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import Awaitable, ParameterSharding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_bls import _native
from torchrec_bls.collective.channel import BoundedLagChannel
from torchrec_bls.distributed.agreement import Agreement, terms_of
from torchrec_bls.distributed.config import BLSConfig
from torchrec_bls.distributed.exchange import Exchange
from torchrec_bls.distributed.ids import BoundedLagIdsDist
from torchrec_bls.distributed.routes import Route, RoutedIdsAwaitable
from torchrec_bls.distributed.tables import LookupTables

_NO_LIMIT = (1 << 63) - 1


class BoundedLagModule:
    """Mix-in of the sharded modules: owns their exchanges and checks what goes in."""

    _sharding_types: list[str]  # TorchRec's

    def _init_bounded_lag(
        self,
        config: BLSConfig,
        group: dist.ProcessGroup,
        module_fqn: str | None,
        tables: Sequence[Any],
        params: Mapping[str, ParameterSharding],
    ) -> None:
        if config.codecs is not None:
            config.codecs.check(tables)
        self._bls_config = config
        self._bls_group = group
        self._bls_name = module_fqn or type(self).__name__
        terms = terms_of(config, tables, params)
        self._bls_agreement = Agreement(group, self._bls_name, config.deadline, terms)
        self._bls_exchanges: dict[str, Exchange] = {}
        self._bls_rows_by_feature = _rows_by_feature(tables)
        self._bls_keys: list[str] | None = None
        self._bls_row_limits: list[int] = []
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
        for sharding_type in self._sharding_types:
            self._exchange(sharding_type, "ids")
        # Those with a channel first: to tell of the others takes a store, which may be slow.
        for exchange in sorted(self._bls_exchanges.values(), key=lambda each: each.channel is None):
            exchange.fail(reason)

    def _exchange(self, sharding_type: str, direction: str) -> Exchange:
        """Returns the exchange of a direction: "ids", "embeddings" or "gradients"."""
        name = f"{self._bls_name}.{sharding_type}.{direction}"
        return self._bls_exchanges.setdefault(
            name, Exchange(self._bls_group, self._bls_config, name, self.fail)
        )

    def _swap_ids_dists(
        self, sharding_types: Iterable[str], input_dists: Iterable[nn.Module]
    ) -> None:
        # The outer dist stays: TorchRec asks for its class and for what it keeps of bucketizing.
        for sharding_type, input_dist in zip(sharding_types, input_dists, strict=True):
            theirs: Any = input_dist._dist
            input_dist._dist = BoundedLagIdsDist(
                self._bls_group,
                theirs._splits,
                theirs._stagger,
                self._exchange(sharding_type, "ids"),
                self._bls_config.codecs is not None,
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, *input: Any, **kwargs: Any) -> Any:
        """See TorchRec; torch.compile breaks its graph here."""
        return super().forward(*input, **kwargs)  # type: ignore[misc]

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Awaitable[Any]:
        """Posts the ids of a batch; see TorchRec.

        Raises:
            ValueError: the input does not fit the module. The other ranks raise PoisonedError, or
                RendezvousError if it is the first batch.
        """
        counts = self._check_input(features)
        self._bls_agreement.reach()
        if self._bls_routes is not None:
            with torch.no_grad():
                return self._post_along_routes(self._bls_routes, ctx, features, counts)
        awaitable = super().input_dist(ctx, features)  # type: ignore[misc]
        for ids, sharding_context in zip(awaitable.awaitables, ctx.sharding_contexts, strict=True):
            ids.bind(sharding_context)
        # TorchRec has made its input dists by now.
        self._bls_routes = self._plan_routes(features.keys())
        return awaitable

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

    def _check_input(self, features: object) -> list[int]:
        """Returns the number of ids of each key. Raises ValueError, and fails the other ranks with
        the reason, for input that does not fit the module."""
        if self.bound > 0 and torch.is_grad_enabled():
            self._refuse(
                f"bound is {self.bound} and autograd is on: gradients of up to {self.bound} "
                "iterations ago would update rows that later lookups have read already. Use "
                "torch.no_grad() for inference, or bound 0 for training"
            )
        if not isinstance(features, KeyedJaggedTensor):
            self._refuse(f"input is a {type(features).__name__}, not a KeyedJaggedTensor")
        if features.variable_stride_per_key():
            self._refuse(
                "input has a batch size per key; bounded-lag modules need one batch size per rank"
            )
        keys = features.keys()
        if keys != self._bls_keys:
            self._learn_keys(keys)
        return self._check_ids(features)

    def _learn_keys(self, keys: list[str]) -> None:
        unknown = [key for key in keys if key not in self._bls_rows_by_feature]
        missing = [key for key in self._bls_rows_by_feature if key not in keys]
        if missing:
            self._refuse(
                f"the KeyedJaggedTensor lacks the features {missing} of the module"
                + (f" and has keys that the module does not have: {unknown}" if unknown else "")
            )
        if self._bls_keys is not None:
            self._refuse(
                f"the keys are {keys}, but those of the first batch were {self._bls_keys}: keep "
                "keys and their order the same in all batches"
            )
        if unknown:
            warnings.warn(
                f"{self._bls_name}: the KeyedJaggedTensor has keys that the module does not have, "
                f"which are ignored: {unknown}",
                stacklevel=4,
            )
        self._bls_keys = list(keys)
        self._bls_row_limits = [self._bls_rows_by_feature.get(key, _NO_LIMIT) for key in keys]

    def _check_ids(self, features: KeyedJaggedTensor) -> list[int]:
        lengths, values = features.lengths().contiguous(), features.values().contiguous()
        try:
            counts, bad = _native.check_ids(
                (lengths.data_ptr(), lengths.element_size()),
                (values.data_ptr(), values.element_size()),
                features.stride(),
                values.numel(),
                self._bls_row_limits,
            )
        except ValueError as error:
            self._refuse(f"malformed KeyedJaggedTensor: {error}")
        if bad is not None:
            feature, position, value = bad
            key, rows = features.keys()[feature], self._bls_row_limits[feature]
            self._refuse(
                f"id {value} at position {position} of feature '{key}' is out of range: its table "
                f"has {rows} rows, so ids go from 0 to {rows - 1}"
            )
        return counts

    def _refuse(self, problem: str) -> NoReturn:
        message = f"{self._bls_name} on rank {self._bls_group.rank()}: {problem}"
        # The other ranks count on this one's messages of this batch.
        self.fail(message)
        raise ValueError(message)


def _rows_by_feature(tables: Iterable[Any]) -> dict[str, int]:
    """Returns the smallest number of rows of the tables that each feature is looked up in."""
    rows: dict[str, int] = {}
    for table in tables:
        for feature in table.feature_names:
            rows[feature] = min(table.num_embeddings, rows.get(feature, table.num_embeddings))
    return rows

"""The common part of all sharded modules that exchange: their exchanges, and posting batches."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_compiling
from torchrec.distributed.types import Awaitable, LazyAwaitable, ParameterSharding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_bls.collective.channel import BoundedLagChannel
from torchrec_bls.collective.transport.rank_names import rank_name
from torchrec_bls.direct.reads.direct_reads import DirectReads
from torchrec_bls.distributed.config import BLSConfig
from torchrec_bls.distributed.data_parallel import exchanged
from torchrec_bls.distributed.exchanges.plan_agreement import Agreement, terms_of
from torchrec_bls.distributed.inputs.batch_note import IdsNote
from torchrec_bls.distributed.inputs.callers import Callers
from torchrec_bls.distributed.inputs.input_check import CheckedBatch, InputCheck
from torchrec_bls.distributed.inputs.input_dist import IdsLayout
from torchrec_bls.distributed.inputs.refused_batches import (
    Calls,
    RefusedEmbeddings,
    take_part_in_the_rest,
)
from torchrec_bls.distributed.module_state import NO_NOTE, ModuleExchanges, ModuleState
from torchrec_bls.distributed.outputs.inference_mode import outside_inference_mode
from torchrec_bls.errors import BLSError, named


class _AllOrNone:
    """See ExchangedModule. It is no generator, which would take longer to enter and leave."""

    def __init__(self, module: "ExchangedModule", what: str) -> None:
        self._module = module
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            return
        if not isinstance(error, BLSError):  # all ranks know a BLSError already
            self._module.fail(f"{self._what} failed: {named(error)}")
        self._module._bls.meet_again()


class ExchangedModule:
    """Mix-in of sharded modules. It owns their exchanges, and handles the batches of serving."""

    _sharding_types: list[str]  # of the exchanges; from TorchRec where it shards the module
    _bls: ModuleState
    calls: Calls

    def _init_exchanges(
        self,
        config: BLSConfig,
        group: dist.ProcessGroup,
        name: str,
        tables: Sequence[Any],
        params: Mapping[str, ParameterSharding],
        is_weighted: bool,
    ) -> None:
        exchanges = ModuleExchanges(group, config, name, self.fail)
        self._bls = ModuleState(
            exchanges,
            Agreement(group, name, exchanges.deadline, terms_of(config, tables, params)),
            InputCheck(name, tables, is_weighted, config.bad_ids),
            list(tables),
            Callers(f"{name} on {rank_name(group)}", lambda: exchanges.under_way),
        )
        self._bls.forget_lookup()
        self.calls = Calls()

    @property
    def reads_directly(self) -> bool:
        """Returns whether this module reads all ranks' tables itself; False before the first
        forward."""
        return bool(self._bls.reads_directly)

    @property
    def awaits_first_call(self) -> bool:
        """Returns whether the first call is still to decide if this module reads directly."""
        return self._bls.reads_directly is None

    @property
    def version(self) -> str:
        """Returns the version of the weights that lookups read; empty without direct reads."""
        return self._bls.direct.generation.version if self._bls.direct is not None else ""

    @property
    def direct_reads(self) -> DirectReads | None:
        """Returns the direct reads of this module; None before the first forward, or without
        any."""
        return self._bls.direct

    @property
    def input_check(self) -> InputCheck:
        """Returns the check that its batches have to pass."""
        return self._bls.input_check

    @property
    def callers(self) -> Callers:
        """Returns the callers of the module."""
        return self._bls.callers

    def agree_on_lookup(self) -> bool:
        """Returns whether the module reads directly. The ranks decide that in the first call."""
        return self.reads_directly

    @property
    def bound(self) -> int:
        """Returns the number of iterations that ranks may be apart."""
        return self._bls.exchanges.config.bound

    def channels(self) -> dict[str, BoundedLagChannel]:
        """Returns the channels made so far, by name."""
        return self._bls.exchanges.channels()

    @property
    def under_way(self) -> bool:
        """Returns whether this rank has posted exchanges and not waited for them."""
        return self._bls.exchanges.under_way

    def fail(self, reason: str) -> None:
        """Fails the other ranks' waits for this one: they raise errors that quote `reason`."""
        if not self._bls.agreement.reached:
            self._bls.agreement.fail(reason)
            return
        self._bls.exchanges.fail(reason, exchanged(self._sharding_types))

    def forward(self, *input: Any, **kwargs: Any) -> Any:
        """Runs the forward; see TorchRec. torch.compile breaks its graph here."""
        # Asked first: a disabled function costs microseconds even without a compiler.
        if is_compiling():
            return self._forward_uncompiled(*input, **kwargs)
        return super().forward(*input, **kwargs)  # type: ignore[misc]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward_uncompiled(self, *input: Any, **kwargs: Any) -> Any:
        return super().forward(*input, **kwargs)  # type: ignore[misc]

    def _post_nothing(self, ctx: Any, refusal: ValueError) -> Awaitable[Any]:
        """Takes part in the exchange without samples, for a refused batch."""
        ctx.bls_refusal = refusal
        with torch.no_grad():
            return self.post_ids(ctx, self.nothing())

    def check_input(self, features: object) -> CheckedBatch:
        """Returns `features` in the form that `post_ids` takes. Tells the other ranks nothing.

        Raises:
            ValueError: the features do not fit the module.
        """
        try:
            return self._checked(features)
        except Exception as error:  # whatever a request holds, the fault is that request's
            raise ValueError(f"{self._where}: {error}") from error

    def _checked(self, features: object) -> CheckedBatch:
        return self._bls.input_check.check(features)

    @property
    def _where(self) -> str:
        exchanges = self._bls.exchanges
        return f"{exchanges.name} on {rank_name(exchanges.group)}"

    def nothing(self) -> CheckedBatch:
        """Returns a batch without samples, for a rank that has none but takes part."""
        return self._bls.input_check.nothing()

    @staticmethod
    def layout_of(ctx: Any) -> IdsLayout | None:
        """Returns how the ids of a batch came, once they have been waited for; None if none are
        sent.

        Args:
            ctx: context of the batch.
        """
        layouts = (getattr(each, "bls_ids_layout", None) for each in ctx.sharding_contexts)
        return next((layout for layout in layouts if layout is not None), None)

    @property
    def replaced_ids(self) -> int:
        """Returns how many ids got row 0 instead, by BLSConfig(bad_ids="row0")."""
        return self._bls.input_check.replaced_ids

    @property
    def refused_batches(self) -> int:
        """Returns how many batches of this rank did not fit: an id out of range, or a wrong key."""
        return self._bls.input_check.refused_batches

    def post_ids(self, ctx: Any, batch: CheckedBatch, note: IdsNote = NO_NOTE) -> Awaitable[Any]:
        """Posts a batch, and `note` to every rank. The first call makes channels, collectively.

        Args:
            ctx: context from `create_context`.
            batch: batch from `check_input` or `nothing`.
            note: message that goes along with the ids.
        """
        self._bls.exchanges.deadline.training = torch.is_grad_enabled()
        self._bls.meet()
        self._bls.note = note
        self.calls.note()
        with self._all_or_none("posting ids"):
            return self._post_ids(ctx, batch)

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Looks up and posts the embeddings; see TorchRec."""
        return self._post_embeddings(ctx, input)

    @outside_inference_mode
    def _post_embeddings(self, ctx: Any, input: Any) -> Any:
        with self._all_or_none("lookup"):
            embeddings = self._look_up(ctx, input)
        refusal = getattr(ctx, "bls_refusal", None)
        if refusal is None:
            return embeddings
        return RefusedEmbeddings(embeddings, refusal, partial(take_part_in_the_rest, self))

    def prepare(self, sample: KeyedJaggedTensor, largest_batch: int | None = None) -> None:
        """Makes the channels of inference before traffic, collectively, by a lookup of `sample`.

        Args:
            sample: usual batch of this rank.
            largest_batch: largest batch that a rank will ever have; slots get room for it. None:
                the config's expected_batch.

        Raises:
            ValueError: `sample` does not fit the module.
        """
        if largest_batch is not None:
            self.expect_batch(largest_batch)
        with torch.no_grad():
            self(sample).wait()  # type: ignore[operator]

    def expect_batch(self, largest_batch: int) -> None:
        """Sets the size of the largest batch, before the first one. Later it raises ValueError."""
        self._bls.exchanges.expect_batch(largest_batch)

    def _all_or_none(self, what: str) -> "_AllOrNone":
        """Fails all ranks if anything ends this rank's part between the messages of a batch."""
        return _AllOrNone(self, what)

    @abstractmethod
    def _look_up(self, ctx: Any, input: Any) -> LazyAwaitable[Any]:
        """Does the work of TorchRec's compute_and_output_dist, and returns its result."""

    @abstractmethod
    def _post_ids(self, ctx: Any, batch: CheckedBatch) -> Awaitable[Any]:
        """Posts the ids of a batch. Then `layout_of` the context says how the ids came."""

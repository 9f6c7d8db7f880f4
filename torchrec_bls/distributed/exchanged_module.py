"""What all sharded modules have in common that exchange: their exchanges, and batches by them."""

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
from torchrec_bls.distributed.config import BLSConfig
from torchrec_bls.distributed.data_parallel import exchanged
from torchrec_bls.distributed.direct_reads import DirectReads
from torchrec_bls.distributed.exchanges.plan_agreement import Agreement, terms_of
from torchrec_bls.distributed.inputs.batch_note import IdsNote
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
    """See ExchangedModule. A generator takes longer to enter and leave."""

    def __init__(self, module: "ExchangedModule", what: str) -> None:
        self._module = module
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        # What is a BLSError is known to all ranks.
        if error is not None and not isinstance(error, BLSError):
            self._module.fail(f"{self._what} failed: {named(error)}")


class ExchangedModule:
    """Mix-in of sharded modules: owns their exchanges, and takes batches as serving has them."""

    _sharding_types: list[str]  # of the exchanges; TorchRec's, where it shards the module
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
        )
        self._bls.forget_lookup()
        self.calls = Calls()

    @property
    def reads_directly(self) -> bool:
        """Whether this module reads all ranks' tables itself; False before the first forward."""
        return bool(self._bls.reads_directly)

    @property
    def generation(self) -> int:
        """Version of the weights that lookups read, counted from 1; 0 without direct reads."""
        return self._bls.direct.generation.number if self._bls.direct is not None else 0

    @property
    def direct_reads(self) -> DirectReads | None:
        """What this module reads directly; None before the first forward, and where it does not."""
        return self._bls.direct

    @property
    def input_check(self) -> InputCheck:
        """What its batches have to pass."""
        return self._bls.input_check

    def agree_on_lookup(self) -> bool:
        """Returns whether the module reads directly, which the first call decides, collectively."""
        return self.reads_directly

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

    def forward(self, *input: Any, **kwargs: Any) -> Any:
        """See TorchRec; torch.compile breaks its graph here."""
        # Asked before, since a disabled function costs microseconds without a compiler, too.
        if is_compiling():
            return self._forward_uncompiled(*input, **kwargs)
        return super().forward(*input, **kwargs)  # type: ignore[misc]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward_uncompiled(self, *input: Any, **kwargs: Any) -> Any:
        return super().forward(*input, **kwargs)  # type: ignore[misc]

    def _post_nothing(self, ctx: Any, refusal: ValueError) -> Awaitable[Any]:
        """Takes part without samples, for a batch that is refused."""
        ctx.bls_refusal = refusal
        with torch.no_grad():
            return self.post_ids(ctx, self.nothing())

    def check_input(self, features: object) -> CheckedBatch:
        """Returns `features` as `post_ids` takes them. Tells the other ranks nothing.

        Raises:
            ValueError: they do not fit the module.
        """
        try:
            return self._checked(features)
        except Exception as error:  # whatever a request holds, it is this request's fault
            raise ValueError(f"{self._where}: {error}") from error

    def _checked(self, features: object) -> CheckedBatch:
        return self._bls.input_check.check(features)

    @property
    def _where(self) -> str:
        exchanges = self._bls.exchanges
        return f"{exchanges.name} on rank {exchanges.group.rank()}"

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

    def _all_or_none(self, what: str) -> "_AllOrNone":
        """Fails all ranks for whatever ends this rank's part between the messages of a batch."""
        return _AllOrNone(self, what)

    @abstractmethod
    def _look_up(self, ctx: Any, input: Any) -> LazyAwaitable[Any]:
        """Returns what TorchRec's compute_and_output_dist does."""

    @abstractmethod
    def _post_ids(self, ctx: Any, batch: CheckedBatch) -> Awaitable[Any]:
        """Posts the ids of a batch; `layout_of` the context says how they came."""

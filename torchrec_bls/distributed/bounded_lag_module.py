"""The common part of all sharded modules: what TorchRec, pipelines and their users call.

docs/design/modules.md describes a module's life and the way of a batch.
"""

import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.compiler import is_compiling
from torchrec.distributed.types import Awaitable, ParameterSharding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_bls.collective.channel import BoundedLagChannel
from torchrec_bls.collective.forwards import Forwards
from torchrec_bls.collective.transport.rank_names import rank_name
from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.direct.reads.direct_lookup import DirectLookup
from torchrec_bls.direct.reads.direct_reads import AnyReads
from torchrec_bls.distributed.codec_config import check_tables, encode_any
from torchrec_bls.distributed.config import BLSConfig
from torchrec_bls.distributed.data_parallel import exchanged
from torchrec_bls.distributed.exchanges.plan_agreement import Agreement, terms_of
from torchrec_bls.distributed.inputs.batch_note import NO_NOTE, IdsNote
from torchrec_bls.distributed.inputs.callers import Callers
from torchrec_bls.distributed.inputs.input_check import CheckedBatch, InputCheck
from torchrec_bls.distributed.inputs.refused_batches import RefusedBatchError, RefusedEmbeddings
from torchrec_bls.distributed.lookup import Lookup
from torchrec_bls.distributed.module_state import ModuleExchanges, ModuleState
from torchrec_bls.distributed.outputs.inference_mode import outside_inference_mode
from torchrec_bls.errors import BatchRefusedError


class BoundedLagModule:
    """Mix-in of the sharded modules. It comes before TorchRec's own class."""

    #: Whether rows are stored as FBGEMM's quantized lookups read them.
    is_quantized: ClassVar[bool] = False

    #: Class of its input check.
    _input_checks: ClassVar[type[InputCheck]] = InputCheck

    #: Forwards on this rank.
    forwards: Forwards

    _bls: ModuleState

    def _init_bounded_lag(
        self,
        config: BLSConfig,
        group: dist.ProcessGroup,
        name: str,
        tables: Sequence[Any],
        params: Mapping[str, ParameterSharding],
        is_weighted: bool,
        sharding_types: Sequence[str] = (),
        gpu: Gpu | None = None,
    ) -> None:
        """Makes the state. No other rank is asked for anything.

        Args:
            config: configuration of the sharder.
            group: ranks that the module is sharded over.
            name: name of the module.
            tables: EmbeddingConfig or EmbeddingBagConfig of each table.
            params: plan of the module.
            is_weighted: whether ids have weights.
            sharding_types: names of what is exchanged; by default the plan's sharding types.
            gpu: see ModuleState.
        """
        if config.codecs is not None:
            check_tables(config.codecs, tables)
            if not encode_any(config.codecs, tables):
                config = replace(config, codecs=None)
        exchanges = ModuleExchanges(group, config, name, self.fail)
        self.forwards = Forwards()
        self._bls = ModuleState(
            exchanges,
            Agreement(group, name, exchanges.deadline, terms_of(config, tables, params)),
            self._input_checks(name, tables, is_weighted, config.bad_ids),
            list(tables),
            list(sharding_types) or exchanged({params[t.name].sharding_type: 0 for t in tables}),
            Callers(f"{name} on {rank_name(group)}", self.forwards, lambda: exchanges.under_way),
            self.forwards,
            gpu,
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Leaves the tables where they are when a model is moved to the GPU that reads them."""
        if self._bls.gpu is not None and fn(torch.empty(0)).device.type != "cpu":
            return self
        return super()._apply(fn, recurse)  # type: ignore[misc]

    # The way of a batch, as TorchRec and its pipelines go it.

    def forward(self, *input: Any, **kwargs: Any) -> Any:
        """Runs the forward; see TorchRec. torch.compile breaks its graph here."""
        # Asked first: a disabled function costs microseconds even without a compiler.
        if is_compiling():
            return self._forward_uncompiled(*input, **kwargs)
        return super().forward(*input, **kwargs)  # type: ignore[misc]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward_uncompiled(self, *input: Any, **kwargs: Any) -> Any:
        return super().forward(*input, **kwargs)  # type: ignore[misc]

    def input_dist(self, ctx: Any, features: object) -> Awaitable[Any]:
        """Posts what the other ranks need for a batch; see TorchRec.

        A batch that does not fit the module does not stop the others. In inference the other ranks
        get their rows, and this rank raises ValueError where the embeddings are used. Under
        autograd all ranks raise when they wait for the ids: ValueError here, BatchRefusedError on
        the others.

        Raises:
            ValueError: a pipeline or another thread is calling the module, or tables are read
                directly and autograd is on. Nothing is posted.
        """
        lookup = self._bls.lookup or self.choose_lookup()
        lookup.begin()
        try:
            batch = self.check_input(features)
        except ValueError as error:
            return lookup.refuse(ctx, error)
        return lookup.post(ctx, batch)

    @outside_inference_mode
    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Returns the embeddings, which may be on their way; see TorchRec."""
        lookup = self._bls.lookup or self.choose_lookup()
        embeddings = lookup.output(ctx, input)
        refusal = getattr(ctx, "bls_refusal", None)
        if refusal is None:
            return embeddings
        return RefusedEmbeddings(embeddings, refusal)

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

    # The steps of a batch, as BoundedLagPipeline takes them.

    @outside_inference_mode
    def choose_lookup(self) -> Lookup:
        """Returns the lookup. The ranks choose it in the first call.

        Raises:
            ValueError: lookup is "direct", and a rank can't read directly; all ranks raise.
            RendezvousError: a rank did not come, or could not share its tables.
        """
        state = self._bls
        with state.callers.agreeing:
            if state.lookup is None:
                state.lookup = self._choose()
            return state.lookup

    def check_input(self, features: object) -> CheckedBatch:
        """Returns `features` in the form that `post` takes. Tells the other ranks nothing.

        Raises:
            ValueError: the features do not fit the module.
        """
        lookup = self._bls.lookup or self.choose_lookup()
        try:
            return lookup.check(features)
        except Exception as error:  # whatever a request holds, the fault is that request's
            raise RefusedBatchError(f"{self._bls.where}: {error}") from error

    def nothing(self) -> CheckedBatch:
        """Returns a batch without samples, for a rank that has none but takes part."""
        return self._bls.input_check.nothing()

    def post(self, ctx: Any, batch: CheckedBatch, note: IdsNote = NO_NOTE) -> Awaitable[Any]:
        """Posts a batch, and `note` to every rank; see Lookup.post.

        Args:
            ctx: context from `create_context`.
            batch: batch from `check_input` or `nothing`.
            note: message that goes along with the ids.
        """
        lookup = self._bls.lookup or self.choose_lookup()
        return lookup.post(ctx, batch, note)

    def expect_batch(self, largest_batch: int) -> None:
        """Sets the size of the largest batch, before the first one. Later it raises ValueError."""
        self._bls.exchanges.expect_batch(largest_batch)

    def fail(self, reason: str) -> None:
        """Fails the other ranks' waits for this one: they raise errors that quote `reason`."""
        self._bls.fail(reason)

    def joins_scopes(self) -> bool:
        """Returns whether a forward by this thread, which begins, is a scope of this module, since
        it exchanges or may choose to.

        Raises:
            ValueError: another thread is calling the module.
        """
        state = self._bls
        if state.lookup is None and self.awaits_first_call:
            # Any number of threads may be in the first forward of a module that will read directly.
            scope = self.forwards.now[1]
            return scope is None or scope.is_own
        lookup = state.lookup or self.choose_lookup()
        if lookup.is_direct or state.callers.pipeline is not None:
            return False  # a pipeline posts ids of later batches
        state.callers.enter()
        return True

    def set_owner(self, owner: object) -> None:
        """Sets the module that is called in place of this one, unless it is this one itself."""
        if owner is not self:
            self._bls.owner = weakref.ref(owner)

    def on_new_choice(self, function: Callable[[], None]) -> None:
        """Has `function` called whenever the ranks are about to choose a lookup again."""
        self._bls.on_new_choice.append(function)

    # The rest of a forward that ends early on this rank; see Exchanging.

    @property
    def calls_channel(self) -> BoundedLagChannel | None:
        """Returns the channel on which each call posts first; None until the ranks have met."""
        exchange = self._bls.calls_exchange
        return None if exchange is None else exchange.channel

    @property
    def deadline(self) -> float:
        """Returns the seconds that waits for other ranks may take."""
        return self._bls.exchanges.deadline.seconds

    def awaiting(self) -> list[int]:
        """Returns the ranks that wait for this one before they post."""
        return self._bls.awaiting()

    def meet(self) -> None:
        """Comes to these ranks. It posts nothing."""
        (self._bls.lookup or self.choose_lookup()).meet()

    def take_part(self, trains: bool, refusal: str | None) -> None:
        """Takes part in the next call, without samples.

        Args:
            trains: whether the other ranks have autograd on in it.
            refusal: reason why no rank may get rows; None: all get them.
        """
        with torch.set_grad_enabled(trains):
            owner = self._owner()
            ctx = owner.create_context()
            posted = self.post(ctx, self.nothing(), IdsNote(refusal=refusal))
            if refusal is None:
                owner.compute_and_output_dist(ctx, posted.wait().wait()).wait()
                return
            with suppress(ValueError, BatchRefusedError):  # of this rank, or of one before it
                posted.wait().wait()

    def is_asked_ahead(self) -> bool:
        """Returns whether a peer has sent rows of a call that this rank owes its own."""
        return self._bls.asked_ahead() is not None

    def answer_ahead(self) -> None:
        """Sends the rows of the call that `is_asked_ahead` has found. This rank drops its own."""
        asked = self._bls.asked_ahead()
        call = None if asked is None else self.forwards.ahead.get(asked)
        ctx = None if call is None or call.ctx is None else call.ctx()
        if call is not None and ctx is not None:
            with torch.no_grad(), suppress(RefusedBatchError):
                self._owner().compute_and_output_dist(ctx, call.ids.wait().wait()).wait()

    def _owner(self) -> Any:
        owner = None if self._bls.owner is None else self._bls.owner()
        return self if owner is None else owner

    @abstractmethod
    def _choose(self) -> Lookup:
        """Returns the lookup that the ranks choose, collectively."""

    # What there is to know about the module.

    @property
    def bound(self) -> int:
        """Returns the number of iterations that ranks may be apart."""
        return self._bls.exchanges.config.bound

    @property
    def callers(self) -> Callers:
        """Returns the callers of the module."""
        return self._bls.callers

    @property
    def input_check(self) -> InputCheck:
        """Returns the check that its batches have to pass."""
        return self._bls.input_check

    @property
    def replaced_ids(self) -> int:
        """Returns how many ids got row 0 instead, by BLSConfig(bad_ids="row0")."""
        return self._bls.input_check.replaced_ids

    @property
    def refused_batches(self) -> int:
        """Returns how many batches of this rank did not fit: an id out of range, or a wrong key."""
        return self._bls.input_check.refused_batches

    def channels(self) -> dict[str, BoundedLagChannel]:
        """Returns the channels made so far, by name."""
        return self._bls.exchanges.channels()

    @property
    def under_way(self) -> bool:
        """Returns whether this rank has posted exchanges and not waited for them."""
        return self._bls.exchanges.under_way

    @property
    def awaits_first_call(self) -> bool:
        """Returns whether the first call is still to decide if this module reads directly."""
        return self._bls.lookup is None and self._bls.exchanges.config.lookup != "exchange"

    @property
    def reads_directly(self) -> bool:
        """Returns whether this module reads all ranks' tables itself; False before the first
        forward."""
        lookup = self._bls.lookup
        return lookup is not None and lookup.is_direct

    @property
    def direct_reads(self) -> AnyReads | None:
        """Returns the direct reads; None before the lookup is chosen, or without any."""
        lookup = self._bls.lookup
        return lookup.reads if isinstance(lookup, DirectLookup) else None

    @property
    def version(self) -> str:
        """Returns the version that the last batch saw; empty without direct reads."""
        reads = self.direct_reads
        return "" if reads is None else reads.version

    def wait_checked(self) -> None:
        """Waits until the ids of all batches so far are checked. Those of batches on a GPU are
        checked by it when it reads their rows, after their forwards have returned. A forward
        raises what is known by then, without looking its own batch up.

        Raises:
            ValueError: a batch had an id that its table has no row for; the bags or rows of these
                are NaN. The text names key, position, id, table, batch and version. Each batch is
                told once, here or by a later forward: call it again for the next one.
        """
        reads = self.direct_reads
        if reads is not None:
            reads.wait_checked(self.input_check)

    @property
    def rows_read(self) -> list[int]:
        """Returns how many rows of each rank's shards this rank has read; empty without direct
        reads."""
        reads = self.direct_reads
        return [] if reads is None else reads.rows_read.tolist()

    @property
    def owners_gone(self) -> list[int]:
        """Returns the ranks whose tables are read although their process is gone."""
        reads = self.direct_reads
        return [] if reads is None else reads.tables.owners_gone()

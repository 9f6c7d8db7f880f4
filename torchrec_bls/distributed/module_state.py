"""The state of a bounded-lag module beside TorchRec's own attributes, in one object."""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch.distributed as dist

from torchrec_bls.collective.channel import BoundedLagChannel
from torchrec_bls.collective.forwards import Forwards, call_of
from torchrec_bls.collective.transport.rank_names import rank_name
from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.distributed.config import BLSConfig, Deadline
from torchrec_bls.distributed.exchanges.exchange import Exchange
from torchrec_bls.distributed.exchanges.plan_agreement import Agreement
from torchrec_bls.distributed.exchanges.slot_growth import SlotGrowth
from torchrec_bls.distributed.inputs.callers import Callers
from torchrec_bls.distributed.inputs.input_check import InputCheck
from torchrec_bls.distributed.inputs.posted_calls import PostedCalls
from torchrec_bls.distributed.inputs.variable_batch import features_of_names
from torchrec_bls.distributed.lookup import Lookup
from torchrec_bls.distributed.outputs.lookup_tables import LookupTables
from torchrec_bls.distributed.outputs.output_memory import EmptyOutput, empty_output
from torchrec_bls.errors import BLSError, named

_DIRECTIONS = ("ids", "embeddings", "gradients")


class ModuleExchanges:
    """The exchanges of one module. Each is made when it is first asked for.

    Args:
        group: ranks that the module is sharded over.
        config: configuration of the sharder.
        name: name of the module; the first part of its exchanges' names.
        on_failure: function called with the reason when a post or its completion fails.

    Attributes:
        group: see above.
        config: see above, with the batch size that `expect_batch` was given.
        name: see above.
        deadline: deadline of every wait.
        session: session of the ranks' agreement.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        config: BLSConfig,
        name: str,
        on_failure: Callable[[str], None],
    ) -> None:
        self.group = group
        self.config = config
        self.name = name
        self.deadline = Deadline(config.deadline, group)
        self.session = ""
        self._on_failure = on_failure
        self._made: dict[str, Exchange] = {}
        self._growth: dict[str, SlotGrowth] = {}

    def of(self, sharding_type: str, direction: str) -> Exchange:
        """Returns the exchange of a direction: "ids", "embeddings" or "gradients"."""
        name = f"{self.name}.{sharding_type}.{direction}"
        if name not in self._made:
            self._made[name] = Exchange(
                self.group,
                self.config,
                name,
                self._on_failure,
                self.deadline,
                lambda: self.session,
            )
        return self._made[name]

    def slot_growth(self, sharding_type: str) -> SlotGrowth:
        """Returns the slot growth of a sharding type's exchanges."""
        if sharding_type not in self._growth:
            exchanges = [self.of(sharding_type, direction) for direction in _DIRECTIONS]
            self._growth[sharding_type] = SlotGrowth(self.config.bound, exchanges)
        return self._growth[sharding_type]

    def channels(self) -> dict[str, BoundedLagChannel]:
        """Returns the channels made so far, by name."""
        return {
            exchange.name: exchange.channel
            for exchange in self._made.values()
            if exchange.channel is not None
        }

    @property
    def lacks_channels(self) -> bool:
        """Returns whether there are exchanges, and none of them has a channel yet."""
        return bool(self._made) and not self.channels()

    @property
    def under_way(self) -> bool:
        """Returns whether this rank has posted something that it has not waited for."""
        return any(exchange.under_way for exchange in self._made.values())

    def fail(self, reason: str, sharding_types: Iterable[str]) -> None:
        """Fails all exchanges on all ranks.

        Args:
            reason: reason for the other ranks' errors.
            sharding_types: sharding types whose first batch other ranks may be at. In it they make
                these exchanges.
        """
        for sharding_type in sharding_types:
            self.of(sharding_type, "ids")
        # Those with a channel come first: telling about the others takes a store, which may be
        # slow.
        for exchange in sorted(self._made.values(), key=lambda each: each.channel is None):
            exchange.fail(reason)

    def expect_batch(self, largest_batch: int) -> None:
        """Makes slots with room for `largest_batch` samples of a rank, from the first batch on.

        Raises:
            ValueError: the slots exist already, or the size is not positive.
        """
        if self.channels():
            raise ValueError(
                f"{self.name}: its channels are made already: say how large batches get "
                "before the first one"
            )
        if largest_batch < 1:
            raise ValueError(f"largest_batch is {largest_batch}, but must be positive")
        self.config = replace(self.config, expected_batch=largest_batch)
        for exchange in self._made.values():
            exchange.expected_batch = largest_batch


@dataclass
class ModuleState:
    """The state of a bounded-lag module.

    Attributes:
        exchanges: exchanges of the module.
        agreement: agreement on the plan that the next batch is exchanged by.
        input_check: check of the input.
        tables: EmbeddingConfig or EmbeddingBagConfig of each table.
        sharding_types: sharding types that exchange.
        callers: callers of the module.
        forwards: forwards of the module on this rank.
        gpu: GPU that its outputs are on; None: they are on the host.
        calls: its calls that this rank has posted.
        on_new_choice: functions to call when the lookup is forgotten.
        owner: module that is called in place of the module, since it is a part of it; None if it
            is none.
        lookup: way of its batches to their embeddings; None until the ranks have chosen one.
        lookup_tables: tables of TorchRec's lookups; None before they are first read.
        iterations: number of iterations of the training so far; error bounds may depend on it.
    """

    exchanges: ModuleExchanges
    agreement: Agreement
    input_check: InputCheck
    tables: list[Any]
    sharding_types: list[str]
    callers: Callers
    forwards: Forwards
    gpu: Gpu | None = None
    calls: PostedCalls = field(init=False)
    on_new_choice: list[Callable[[], None]] = field(default_factory=list)
    owner: "weakref.ref[Any] | None" = None
    lookup: Lookup | None = None
    lookup_tables: list[LookupTables] | None = None
    iterations: int = 0

    def __post_init__(self) -> None:
        self.calls = PostedCalls(self.forwards)

    @property
    def where(self) -> str:
        """Returns the name of the module and its rank, for messages."""
        return f"{self.exchanges.name} on {rank_name(self.exchanges.group)}"

    @property
    def empty_output(self) -> EmptyOutput:
        """Returns the function that makes memory of outputs on the host."""
        return empty_output if self.gpu is None else self.gpu.empty_output

    @cached_property
    def features_of_names(self) -> dict[str, str]:
        """Returns the feature of each embedding by its name in the output."""
        return features_of_names(self.tables)

    def forget_plan(self, agreement: Agreement) -> None:
        """Drops everything that depends on the plan so far. The next batch compares `agreement`."""
        self.agreement = agreement
        self.forget_lookup()
        self.lookup_tables = None

    def meet(self) -> None:
        """Makes sure that the ranks have the same plan, collectively at first.

        Raises:
            RendezvousError: see Agreement.reach.
        """
        if not self.agreement.reached:
            self.agreement.reach()
            self.exchanges.session = self.agreement.session
            # With another plan the channels stay, and with them the ends that ranks have told.
            if not self.exchanges.channels():
                self.forwards.meet()

    @cached_property
    def calls_exchange(self) -> Exchange | None:
        """Returns the exchange that each call posts first to; None if nothing is exchanged."""
        return self.exchanges.of(self.sharding_types[0], "ids") if self.sharding_types else None

    def awaiting(self) -> list[int]:
        """Returns the ranks that wait for this one where they agree on the plan, or make the
        channel of `calls_exchange`, or a larger one."""
        if not self.agreement.reached:
            return self.agreement.awaiting()
        if self.calls_exchange is None or (self.lookup is not None and self.lookup.is_direct):
            return []
        return self.calls_exchange.awaiting(self._slot_bytes_of_ids())

    def open_calls_channel(self) -> None:
        """Makes the channel of `calls_exchange` as the next call needs it, collectively."""
        if self.calls_exchange is not None:
            self.calls_exchange.make_room()
            self.calls_exchange.open(0, 0, self._slot_bytes_of_ids())

    def _slot_bytes_of_ids(self) -> int:
        return self.exchanges.slot_growth(self.sharding_types[0]).begin()[1].ids

    def asked_ahead(self) -> int | None:
        """Returns a call outside of scopes that a peer makes in the present forward, and whose rows
        this rank has not sent; None if there is none."""
        ahead = self.forwards.ahead
        # Not over items: a context that is collected meanwhile takes its call out.
        kept = [
            call
            for call in list(ahead)
            if (each := ahead.get(call)) is not None and each.ctx is not None
        ]
        calls = None if self.calls_exchange is None else self.calls_exchange.channel
        if not kept or calls is None:
            return None
        rows = self.exchanges.of(self.sharding_types[0], "embeddings")
        number = self.forwards.now[0]
        if rows.channel is None:
            # Peers make it where they send the first rows. The newest call is of the next batch.
            is_asked = rows.awaiting(0) and calls.native.not_ended(number + 1)
            return kept[-2:][0] if is_asked else None
        label = rows.channel.native.called(0)
        call = None if label is None else call_of(label)
        if call not in kept:
            return None
        if call == self.forwards.newest_ahead:
            # Of the next batch, if there was one before. A peer may have gone on to it.
            in_forward = calls.native.not_ended(number + 1)
            return call if len(in_forward) == self.exchanges.group.size() - 1 else None
        return call

    def fail(self, reason: str) -> None:
        """Fails the other ranks' waits for this one: they raise errors that quote `reason`."""
        if self.agreement.reached:
            self.exchanges.fail(reason, self.sharding_types)
        else:
            self.agreement.fail(reason)

    def fail_all(self, what: str, error: BaseException) -> None:
        """Fails all ranks, since `error` ended this rank's part between the messages of a batch.

        If there are no channels yet, the next forward begins at the agreement. So ranks that failed
        in different places of the first one meet again.
        """
        if not isinstance(error, BLSError):  # all ranks know a BLSError already
            self.fail(f"{what} failed: {named(error)}")
        if self.exchanges.lacks_channels:
            self.agreement.forget()
            if self.exchanges.config.lookup != "exchange":
                self.forget_lookup()

    def forget_lookup(self) -> None:
        """Makes the ranks choose a lookup again."""
        if self.lookup is not None:
            self.lookup.abandon()
        self.lookup = None
        for function in self.on_new_choice:
            function()

"""The state of a bounded-lag module beside TorchRec's own attributes, in one object."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch.distributed as dist

from torchrec_bls.collective.channel import BoundedLagChannel
from torchrec_bls.direct.reads.direct_reads import DirectReads
from torchrec_bls.distributed.config import BLSConfig, Deadline
from torchrec_bls.distributed.exchanges.exchange import Exchange
from torchrec_bls.distributed.exchanges.plan_agreement import Agreement
from torchrec_bls.distributed.exchanges.slot_growth import SlotGrowth
from torchrec_bls.distributed.inputs.batch_note import IdsNote
from torchrec_bls.distributed.inputs.callers import Callers
from torchrec_bls.distributed.inputs.routes import Route
from torchrec_bls.distributed.inputs.input_check import InputCheck
from torchrec_bls.distributed.inputs.variable_batch import features_of_names
from torchrec_bls.distributed.outputs.lookup_tables import LookupTables

_DIRECTIONS = ("ids", "embeddings", "gradients")
NO_NOTE = IdsNote()


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
    """The state of a bounded-lag module. A copy shares the exchanges.

    Attributes:
        exchanges: exchanges of the module.
        agreement: agreement on the plan that the next batch is exchanged by.
        input_check: check of the input.
        tables: EmbeddingConfig or EmbeddingBagConfig of each table.
        callers: callers of the module.
        note: message to all ranks along with the next ids.
        routes: ways of batches past TorchRec's input dist; None before the first batch, and where
            there are none.
        dist_keys: keys that TorchRec's input dists are made for; None before the first batch.
        lookup_tables: tables of the lookups; None before they are first read.
        iterations: number of iterations of the training so far; error bounds may depend on it.
        reads_directly: whether the module reads all ranks' tables in place of exchanging; None
            until the ranks have agreed.
        direct: the direct reads; None before the first batch with keys.
    """

    exchanges: ModuleExchanges
    agreement: Agreement
    input_check: InputCheck
    tables: list[Any]
    callers: Callers
    note: IdsNote = NO_NOTE
    routes: list[Route] | None = None
    dist_keys: list[str] | None = None
    lookup_tables: list[LookupTables] | None = None
    iterations: int = 0
    reads_directly: bool | None = None
    direct: DirectReads | None = None

    @cached_property
    def features_of_names(self) -> dict[str, str]:
        """Returns the feature of each embedding by its name in the output."""
        return features_of_names(self.tables)

    def forget_plan(self, agreement: Agreement) -> None:
        """Drops everything that depends on the plan so far. The next batch compares `agreement`."""
        self.agreement = agreement
        self.forget_lookup()
        self.routes = None
        self.lookup_tables = None

    def meet(self) -> None:
        """Makes sure that the ranks have the same plan, collectively at first.

        Raises:
            RendezvousError: see Agreement.reach.
        """
        if not self.agreement.reached:
            self.agreement.reach()
            self.exchanges.session = self.agreement.session

    def meet_again(self) -> None:
        """Makes the next forward begin at the agreement, if this one came to none of its channels.
        So ranks that failed in different places of it meet again."""
        if self.exchanges.lacks_channels:
            self.agreement.forget()
            self.forget_lookup()

    def forget_lookup(self) -> None:
        """Makes the ranks agree again on the way of lookups, where there is a choice."""
        if self.direct is not None:
            self.direct.abandon()
        self.direct = None
        self.reads_directly = False if self.exchanges.config.lookup == "exchange" else None

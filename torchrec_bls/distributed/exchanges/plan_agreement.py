"""The terms that the ranks of a sharded module agree on before they exchange anything.

A channel's messages carry only bytes, not their meaning. Ranks with other tables, or with the same
tables sharded otherwise, would read each other's messages wrongly, or would wait for channels that
the others never make.
"""

import gc
import hashlib
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import torch.distributed as dist
from torchrec.distributed.types import ParameterSharding

from torchrec_bls.collective.transport.rendezvous import Rendezvous, require_equal
from torchrec_bls.distributed.codec_config import describe
from torchrec_bls.distributed.config import BLSConfig, Deadline
from torchrec_bls.errors import RendezvousError

_CURE = "Shard the same model by the same plan and configuration on every rank"
_CURES = {"bound": "Give every rank the same bound"}
_NOTHING = "nothing"

# Agreements that the ranks have not come to yet.
_open: "weakref.WeakSet[Agreement]" = weakref.WeakSet()


class Agreement:
    """Terms of a module, as names and values. Its ranks compare them once.

    A module is known to the other ranks by its name and terms. If two modules of a process have the
    same, and no rank has met either, the ranks may call them in different orders, and each would
    get rows of the other: both are refused.

    Args:
        group: the module's ranks.
        name: name of the module.
        deadline: deadline of the module's waits for the other ranks; each module has its own.
        terms: values by name, one line each; a name has no ": ".

    Attributes:
        reached: whether all ranks are known to have the same terms.
        session: what names their meeting, the same on all ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup, name: str, deadline: Deadline, terms: Mapping[str, str]
    ) -> None:
        self._group = group
        self._name = f"{name} plan"
        self.reached = False
        self.session = ""
        self._deadline = deadline
        self._text = "\n".join(f"{name}: {value}" for name, value in terms.items())
        self._tried: Rendezvous | None = None
        _open.add(self)

    def reach(self) -> None:
        """Compares the terms, collectively. Does nothing if that was done before.

        Raises:
            RendezvousError: terms differ (the text names the first), or a rank did not come, or a
                process has two such modules.
        """
        if self.reached:
            return
        self._tried = rendezvous = self._rendezvous()
        self._refuse_twins(rendezvous)
        # The terms of many tables are long, and the store would bring those of each rank to each
        # rank.
        digest = hashlib.sha256(self._text.encode()).hexdigest()
        records = rendezvous.exchange("digest", {"digest": digest})
        if any(record["digest"] != digest for record in records):
            self._explain(rendezvous)
        self._tried = None
        self.session = rendezvous.session
        self.reached = True
        _open.discard(self)

    def awaiting(self) -> list[int]:
        """Returns the ranks that have come to compare terms, before this one has."""
        return self._rendezvous().awaiting()

    def forget(self) -> None:
        """Makes the ranks compare the terms again, since their first exchange was not set up."""
        self.reached = False
        _open.add(self)

    def fail(self, reason: str) -> None:
        """Tells ranks that compare terms why this one does not come."""
        # Without a store no rank waits.
        with suppress(RuntimeError):
            self._tried = self._tried or self._rendezvous()
            self._tried.fail(reason)

    def _rendezvous(self) -> Rendezvous:
        return Rendezvous(self._group, self._name, self._deadline.seconds)

    def _refuse_twins(self, rendezvous: Rendezvous) -> None:
        if not self._has_twin():
            return
        gc.collect()  # a model that nobody has any more may be held by cycles
        if self._has_twin():
            reason = (
                f"{self._name}: two models of this process have a module of this name, with equal "
                "tables and plans, and the ranks have met for neither. The other ranks can't see "
                "which of the two this rank calls first. Give each model a name: "
                "BLSConfig(name='canary')"
            )
            rendezvous.fail(reason)
            raise RendezvousError(reason)

    def _has_twin(self) -> bool:
        return any(self._is_twin(other) for other in _open)

    def _is_twin(self, other: "Agreement") -> bool:
        # A module may have several agreements, one after the other, but has one deadline.
        return (
            other._deadline is not self._deadline
            and other._group is self._group
            and other._name == self._name
            and other._text == self._text
        )

    def _explain(self, rendezvous: Rendezvous) -> NoReturn:
        texts = [record["text"] for record in rendezvous.exchange("text", {"text": self._text})]
        terms = [dict(line.partition(": ")[::2] for line in text.splitlines()) for text in texts]
        names = list(dict.fromkeys(name for of_rank in terms for name in of_rank))
        records = [{name: of_rank.get(name, _NOTHING) for name in names} for of_rank in terms]
        require_equal(
            self._name, records, {name: _CURES.get(name, _CURE) for name in names}, rendezvous.names
        )
        raise RendezvousError(
            f"channel '{self._name}': digests differ between ranks, but terms do not. Install one "
            "version of torchrec-bls on all ranks"
        )


def terms_of(
    config: BLSConfig, tables: Iterable[Any], params: Mapping[str, ParameterSharding]
) -> dict[str, str]:
    """Returns the terms that a module's exchanges depend on: its tables, their order and the plan.

    Args:
        config: configuration of the sharder.
        tables: EmbeddingConfig or EmbeddingBagConfig of each table.
        params: the module's plan.
    """
    # The channels themselves compare the transport.
    terms = {
        "bound": str(config.bound),
        "slot_bytes": str(config.slot_bytes),
        "lookup": config.lookup,
    }
    for number, table in enumerate(tables):
        planned = params[table.name]
        shards: list[Any] = getattr(planned.sharding_spec, "shards", [])
        sizes = " ".join("x".join(map(str, shard.shard_sizes)) for shard in shards)
        terms[f"table {number}"] = (
            f"'{table.name}' of {table.num_embeddings} x {table.embedding_dim} "
            f"{table.data_type.name} for features {table.feature_names}, "
            f"{planned.sharding_type} on ranks {planned.ranks} as {sizes}"
        )
        if config.codecs is not None:
            terms[f"codecs of table {number}"] = describe(config.codecs, table.name)
    return terms

"""The terms that the ranks of a sharded module agree on before they exchange anything.

A channel's messages carry only bytes, not their meaning. Ranks with other tables, or with the same
tables sharded otherwise, would read each other's messages wrongly, or would wait for channels that
the others never make.
"""

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import torch.distributed as dist
from torchrec.distributed.types import ParameterSharding

from torchrec_bls.collective.transport.rendezvous import Rendezvous, require_equal
from torchrec_bls.distributed.config import BLSConfig, Deadline
from torchrec_bls.errors import RendezvousError

_PHASE = "digest"
_CURE = "Shard the same model by the same plan and configuration on every rank"
_NOTHING = "nothing"


class Agreement:
    """Terms of a module, as names and values. Its ranks compare them once.

    Args:
        group: the module's ranks.
        name: name of the module.
        deadline: deadline of the wait for the other ranks.
        terms: values by name, one line each; a name has no ": ".

    Attributes:
        reached: whether all ranks are known to have the same terms.
    """

    def __init__(
        self, group: dist.ProcessGroup, name: str, deadline: Deadline, terms: Mapping[str, str]
    ) -> None:
        self._group = group
        self._name = f"{name} plan"
        self.reached = False
        self._deadline = deadline
        self._text = "\n".join(f"{name}: {value}" for name, value in terms.items())

    def reach(self) -> None:
        """Compares the terms, collectively. Does nothing if that was done before.

        Raises:
            RendezvousError: terms differ (the text names the first), or a rank did not come.
        """
        if self.reached:
            return
        rendezvous = Rendezvous(self._group, self._name, self._deadline.seconds)
        # The terms of many tables are long, and the store would bring those of each rank to each
        # rank.
        digest = hashlib.sha256(self._text.encode()).hexdigest()
        records = rendezvous.exchange(_PHASE, {"digest": digest})
        if any(record["digest"] != digest for record in records):
            self._explain(rendezvous)
        self.reached = True

    def fail(self, reason: str) -> None:
        """Tells ranks that compare terms why this one does not come."""
        # Without a store no rank waits.
        with suppress(RuntimeError):
            Rendezvous(self._group, self._name, self._deadline.seconds).fail(_PHASE, reason)

    def _explain(self, rendezvous: Rendezvous) -> NoReturn:
        texts = [record["text"] for record in rendezvous.exchange("text", {"text": self._text})]
        terms = [dict(line.partition(": ")[::2] for line in text.splitlines()) for text in texts]
        names = list(dict.fromkeys(name for of_rank in terms for name in of_rank))
        records = [{name: of_rank.get(name, _NOTHING) for name in names} for of_rank in terms]
        require_equal(self._name, records, dict.fromkeys(names, _CURE))
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
    # The channels themselves compare the bound and the transport.
    terms = {"slot_bytes": str(config.slot_bytes), "lookup": config.lookup}
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
            terms[f"codecs of table {number}"] = config.codecs.describe(table.name)
    return terms

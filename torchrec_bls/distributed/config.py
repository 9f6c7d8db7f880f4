"""Configuration of the bounded-lag sharders."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchrec_bls.collective.exchange_options import ExchangeOptions, timeout_of
from torchrec_bls.distributed.codec_config import CodecConfig
from torchrec_bls.huge_pages import HugePages

_BAD_IDS = ("refuse", "row0")
_LOOKUPS = ("exchange", "direct", "auto")
# Seconds, where nothing is trained: a service would rather fail a batch than wait half an hour.
INFERENCE_DEADLINE = 60.0


@dataclass(frozen=True)
class BLSConfig(ExchangeOptions):
    """How the modules of a sharder exchange ids and embeddings: ExchangeOptions and these fields.

    Attributes:
        bad_ids: treatment of a batch with ids that tables have no rows for. "refuse": this rank
            raises ValueError for the batch, and in inference the others go on. "row0": row 0 is
            looked up for such ids, as TorchRec does; the modules' `replaced_ids` counts them.
        expected_batch: largest batch per rank, to derive `slot_bytes` from if the first batch is
            not typical.
        codecs: codecs of embeddings and their gradients; None: they travel as they are.
        lookup: way of lookups. "exchange": the ranks that have the rows look them up and send them.
            "direct": each rank reads the rows of its own batch itself, in shared memory. It waits
            for no other rank, and is for inference on one host, where tables do not change
            (docs/design/direct-reads.md). "auto": direct, if all ranks can at the first forward;
            otherwise exchange, and rank 0 warns with the reason.
        name: name of the model. Models with equal modules need one each if they are in use at the
            same time: by it the ranks tell them apart. It is the same on all ranks, and begins the
            names of channels.
        huge_pages: whether the tables of direct reads ask for pages of 2 MiB, which make reads and
            switches faster, and page tables small. None: modules with tables of 1 GiB or more do.
            Where the kernel has no such page, small ones serve, and
            `ServingState.small_page_bytes` counts them. "hugetlb": pages of the host's pool
            (vm.nr_hugepages), and RendezvousError if it has too few. The process must not write
            to its weights then (docs/design/tables-for-a-service.md).
    """

    expected_batch: int | None = None
    bad_ids: str = "refuse"
    codecs: CodecConfig | None = None
    lookup: str = "exchange"
    huge_pages: HugePages | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for values that no channel can have."""
        super().__post_init__()
        if self.expected_batch is not None and self.expected_batch < 1:
            raise ValueError(f"expected_batch is {self.expected_batch}, but must be positive")
        if self.name is not None and not _is_name(self.name):
            raise ValueError(
                f"name is {self.name!r}, but must be a text of printable characters, as 'canary'"
            )
        for name, possible in (("bad_ids", _BAD_IDS), ("lookup", _LOOKUPS)):
            value = getattr(self, name)
            if value not in possible:
                raise ValueError(f"{name} is {value!r}, but must be one of {', '.join(possible)}")
        if self.huge_pages not in (None, False, True, "hugetlb"):
            raise ValueError(
                f"huge_pages is {self.huge_pages!r}, but must be None, False, True or 'hugetlb'"
            )
        if self.lookup == "direct" and self.codecs is not None:
            raise ValueError(
                'codecs encode embeddings on their way, and lookup="direct" sends none: leave '
                'codecs out, or use lookup="exchange"'
            )


def name_of_module(config: BLSConfig, path: str) -> str:
    """Returns the name of a module among the ranks, given its path in the model."""
    return path if config.name is None else f"{config.name}/{path}"


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.isprintable() and bool(name.strip())


class Deadline:
    """The seconds that a module's waits may take. They are decided when a channel is made.

    The parts of a forward and a backward make channels where autograd is off, whether or not they
    train.

    Args:
        given: deadline of the configuration; None chooses a default.
        group: the module's ranks.

    Attributes:
        training: whether autograd was on when the last forward began.
    """

    def __init__(self, given: float | None, group: dist.ProcessGroup) -> None:
        self._given = given
        self._group = group
        self.training = torch.is_grad_enabled()

    @property
    def seconds(self) -> float:
        """Returns the given deadline. Without one it is the group's timeout in training, else
        INFERENCE_DEADLINE."""
        if self._given is not None:
            return self._given
        return timeout_of(self._group) if self.training else INFERENCE_DEADLINE

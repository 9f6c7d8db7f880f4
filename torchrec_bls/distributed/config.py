"""Configuration of the bounded-lag sharders."""

from dataclasses import dataclass

from torchrec_bls import _native
from torchrec_bls.collective.channel import check_bound, check_deadline, check_transport
from torchrec_bls.collective.verbs_config import VerbsConfig
from torchrec_bls.distributed.codecs import CodecConfig

_BAD_IDS = ("refuse", "row0")


@dataclass(frozen=True)
class BLSConfig:
    """How the modules of a sharder exchange ids and embeddings.

    Attributes:
        bound: iterations that ranks may be apart. 0 is synchronous and the only one that trains.
        transport: what messages travel by. "shm" is shared memory, for the ranks of one host;
            "verbs" is RDMA for all; "c10d" is asynchronous all-to-alls of gloo; "auto" is shared
            memory among the ranks of a host and RDMA between hosts, or c10d for all where a host
            has no RDMA.
        slot_bytes: size of every slot. None derives it per exchange from the first batch, with
            room for messages half as large again.
        expected_batch: largest batch per rank, for that derivation, when the first is not typical.
        bad_ids: what becomes of a batch with ids that tables have no rows for. "refuse": this rank
            raises ValueError for it, and in inference the others go on. "row0": row 0 is looked up
            for them, as TorchRec does; the modules' `replaced_ids` counts them.
        deadline: seconds after which waiting for a peer is an error.
        codecs: how embeddings and their gradients are encoded; None: they travel as they are.
        verbs: how RDMA devices are used; None: as the environment variables TORCHREC_BLS_IB_* say.
    """

    bound: int = 0
    transport: str = "auto"
    slot_bytes: int | None = None
    expected_batch: int | None = None
    bad_ids: str = "refuse"
    deadline: float = 60.0
    codecs: CodecConfig | None = None
    verbs: VerbsConfig | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for values that no channel can have."""
        check_bound(self.bound)
        check_transport(self.transport)
        if self.slot_bytes is not None and self.slot_bytes < _native.MIN_SLOT_BYTES:
            raise ValueError(
                f"slot_bytes is {self.slot_bytes}, but a message header alone may take "
                f"{_native.MIN_SLOT_BYTES}: leave it None or use more"
            )
        if self.expected_batch is not None and self.expected_batch < 1:
            raise ValueError(f"expected_batch is {self.expected_batch}, but must be positive")
        if self.bad_ids not in _BAD_IDS:
            raise ValueError(
                f"bad_ids is {self.bad_ids!r}, but must be one of {', '.join(_BAD_IDS)}"
            )
        check_deadline(self.deadline)

"""Configuration of the bounded-lag sharders."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchrec_bls.collective.exchange_options import ExchangeOptions, timeout_of
from torchrec_bls.distributed.codecs import CodecConfig

# In seconds, where nothing is trained: a service rather fails a batch than wait half an hour.
INFERENCE_DEADLINE = 60.0


@dataclass(frozen=True)
class BLSConfig(ExchangeOptions):
    """How the modules of a sharder exchange ids and embeddings; ExchangeOptions, and these fields.

    Attributes:
        expected_batch: largest batch per rank, to derive `slot_bytes` from when the first is not
            typical.
        codecs: how embeddings and their gradients are encoded; None: they travel as they are.
    """

    expected_batch: int | None = None
    codecs: CodecConfig | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for values that no channel can have."""
        super().__post_init__()
        if self.expected_batch is not None and self.expected_batch < 1:
            raise ValueError(f"expected_batch is {self.expected_batch}, but must be positive")


class Deadline:
    """Seconds that the waits of a module may take, decided when a channel is made.

    The parts of a forward and a backward make channels at places where autograd is off, whether or
    not they train.

    Args:
        given: of the configuration.
        group: of the module.

    Attributes:
        training: whether autograd was on when the last forward began.
    """

    def __init__(self, given: float | None, group: dist.ProcessGroup) -> None:
        self._given = given
        self._group = group
        self.training = torch.is_grad_enabled()

    @property
    def seconds(self) -> float:
        """What was given, else the group's timeout if training and INFERENCE_DEADLINE if not."""
        if self._given is not None:
            return self._given
        return timeout_of(self._group) if self.training else INFERENCE_DEADLINE

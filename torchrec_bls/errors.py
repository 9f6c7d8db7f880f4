"""Errors of a run. A caller's own mistakes are ``ValueError`` instead."""


class BLSError(RuntimeError):
    """Base of all errors between ranks."""


class PeerTimeoutError(BLSError, TimeoutError):
    """A peer did not arrive by the deadline; the text names it."""


class PeerDiedError(BLSError):
    """A peer's process is gone."""


class PeerClosedError(BLSError):
    """A peer closed the channel while this rank still waited for it."""


class ProtocolError(BLSError):
    """A peer sent something that contradicts what both ranks agreed on."""


class PoisonedError(BLSError):
    """Another rank failed first; the text names it and its reason."""


class BatchRefusedError(BLSError):
    """Another rank refused its batch under autograd, so that no rank can train on this one. The
    next batch is not affected."""


class DrainedError(BLSError):
    """No version serves, since one is being made on a host that can't hold two. The text says which
    process makes it."""


class RendezvousError(BLSError):
    """The ranks could not set up a channel together."""


class ChannelClosedError(BLSError):
    """This rank closed the channel before."""


class TransportError(BLSError):
    """The network below the channel failed, although no peer ended. The text names the device, and
    says what to do."""


class RankFailedError(BLSError):
    """This rank failed in the middle of an exchange, so that all ranks failed. ``__cause__`` says
    why."""


class PipelineError(RuntimeError):
    """One batch of this rank has no output. ``iteration`` says which, and ``__cause__`` why. The
    other ranks and the other batches are not affected."""

    def __init__(self, message: str, iteration: int) -> None:
        super().__init__(message)
        self.iteration = iteration


class BadBatchError(PipelineError, ValueError):
    """The batch does not fit the model."""


def named(error: BaseException) -> str:
    """Returns the type and the text of `error`, to tell other ranks."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")

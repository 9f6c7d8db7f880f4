"""This process and other processes.

The parent publishes, listens and follows, not its forked child, which has copies of all objects. So
an object with such a part keeps the handle of its process, and asks it at every use.
"""

import os
from pathlib import Path

from torchrec_bls.collective.transport.rendezvous import host_identity
from torchrec_bls.errors import RendezvousError
from torchrec_bls.lifetime import in_forked_child, new_lock

# Most bits of a process number in Linux.
_PID_BITS = 22
_PID_MASK = (1 << _PID_BITS) - 1
# Fields of /proc/PID/stat after the name of the program.
_STATE, _START = 0, 19


class Process:
    """A process that `this_process` names. It is made by `this_process` alone.

    Attributes:
        pid: its number, as /proc has it.
        identity: a number that tells it from all others in this PID namespace since the host was
            started, by its start time. Control pages have it.
        host: boot, PID namespace and user namespace, see host_identity.
        is_own: whether this is the process; False in a child that was forked later. It costs no
            more than reading an attribute.
    """

    def __init__(self) -> None:
        try:
            found, self.host = _identity_at("self"), host_identity()
        except OSError as error:
            raise RendezvousError(
                f"cannot look who this process is: {error}. Raise the limit of open files "
                "(ulimit -n)"
            ) from error
        assert found is not None
        self.identity = found
        self.pid = pid_of(found)
        self.is_own = True


def this_process() -> Process:
    """Returns the handle of this process, the same at each call. A forked child has another one.

    Raises:
        RendezvousError: this process has no descriptor left to ask who it is.
    """
    global _own
    with _asking:
        if _own is None:
            _own = Process()
        return _own


def identity_of(pid: int) -> int | None:
    """Returns the number that tells a process from all others; None if it is gone.

    Raises:
        OSError: this process can't look, for want of a descriptor for example.
    """
    return _identity_at(str(pid))


def is_alive(identity: int) -> bool:
    """Returns whether the process of an identity exists. A stopped one does. So does one that this
    process can't look at: a lack of descriptors here is no proof of a death there."""
    if identity == 0:
        return False
    try:
        return identity_of(pid_of(identity)) == identity
    except OSError:
        return _is_in_use(pid_of(identity))


def _is_in_use(pid: int) -> bool:
    """Returns whether a process of this user has a number. It takes no descriptor to ask that."""
    try:
        os.kill(pid, 0)
    except OSError:  # there is none, or another user's
        return False
    return True


def _identity_at(process: str) -> int | None:
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # A process in an inner PID namespace has the number here by which others find it.
    pid = int(text.partition(" ")[0])
    fields = text.rpartition(")")[2].split()
    if fields[_STATE] in "ZXx":
        return None
    return int(fields[_START]) << _PID_BITS | pid


def pid_of(identity: int) -> int:
    """Returns the number of the process of an identity."""
    return identity & _PID_MASK


_own: Process | None = None
_asking = new_lock()


@in_forked_child
def _be_another() -> None:
    global _own
    if _own is not None:
        _own.is_own = False
    _own = None

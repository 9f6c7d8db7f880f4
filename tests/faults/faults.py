"""The faults: each is data that says how, and a call that does it to the rank that makes it."""

import ctypes
import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.distributed.models import Batch
from tests.faults.memory import Slot
from tests.faults.row import LeaveError, Scene
from torchrec_bls import BoundedLagChannel
from torchrec_bls.errors import ChannelClosedError

_CLONE_NEWNS = 0x20000
_MS_PRIVATE_ALL = 0x44000
_MS_BIND = 0x1000


@dataclass(frozen=True)
class Nothing:
    """No fault: what the ranks do is what might go wrong."""

    def __call__(self, scene: Scene) -> None:
        scene.strike()


@dataclass(frozen=True)
class Kill:
    """SIGKILL after some seconds."""

    after: float = 0.0

    def __call__(self, scene: Scene) -> None:
        time.sleep(self.after)
        scene.strike()
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class KillWithChild:
    """SIGKILL of a rank whose forked child lives on, as the workers of a loader do.

    The child lives until all others have ended, or for some seconds.
    """

    seconds: float

    def __call__(self, scene: Scene) -> None:
        if os.fork() == 0:
            others = set(range(scene.row.world)) - {scene.rank}
            ends = [scene.folder / f"end of {rank}" for rank in others]
            limit = time.monotonic() + self.seconds
            while time.monotonic() < limit and not all(end.stat().st_size for end in ends):
                time.sleep(0.05)
            os._exit(0)
        Kill()(scene)


@dataclass(frozen=True)
class KillDuring:
    """SIGKILL in the middle of a call."""

    target: str

    def __call__(self, scene: Scene) -> None:
        mock.patch(self.target, side_effect=lambda *_: Kill()(scene)).start()


@dataclass(frozen=True)
class Stop:
    """SIGSTOP, and SIGCONT after some seconds."""

    seconds: float

    def __call__(self, scene: Scene) -> None:
        pid = os.getpid()
        script = f"kill -STOP {pid}; sleep {self.seconds}; kill -CONT {pid}"
        # By then what was posted has left, also in the background. Were it stopped between two
        # peers, one of them would go on further than the other, and rightly miss both.
        time.sleep(0.5)
        scene.strike()
        subprocess.Popen(["sh", "-c", script])
        time.sleep(0.5)


@dataclass(frozen=True)
class Malform:
    """A request that does not fit the model."""

    make: Callable[[Any], Any]

    def __call__(self, scene: Scene) -> None:
        scene.strike()
        scene.request = self.make(scene.request)


@dataclass(frozen=True)
class EndOfRequests:
    """This rank gets no request any more; the others go on."""

    def __call__(self, scene: Scene) -> None:
        scene.strike()
        scene.request = None


def with_bad_id(request: Any) -> Any:
    """Returns the request with an id that its table has no row for."""
    request.ids.values()[-1] = 10**9
    return Batch(request.ids)


def with_tensor(request: Any) -> Any:
    """Returns a request whose ids are a tensor."""
    return Batch(request.ids.values())


def without_ids(request: Any) -> Any:
    """Returns a request of another form."""
    return request.ids


@dataclass(frozen=True)
class Raise:
    """An exception in the user's code."""

    text: str

    def __call__(self, scene: Scene) -> None:
        scene.strike()
        raise KeyError(self.text)


@dataclass(frozen=True)
class PressCtrlC:
    """SIGINT after some seconds, by when the rank waits."""

    after: float

    def __call__(self, scene: Scene) -> None:
        def press() -> None:
            scene.strike()
            os.kill(os.getpid(), signal.SIGINT)

        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(self.after, press).start()


@dataclass(frozen=True)
class Exit:
    """The process ends without any clean-up."""

    code: int

    def __call__(self, scene: Scene) -> None:
        scene.strike()
        os._exit(self.code)


@dataclass(frozen=True)
class NeverCome:
    """The rank returns before it has made its channel."""

    def __call__(self, scene: Scene) -> None:
        scene.strike()
        raise LeaveError


@dataclass(frozen=True)
class CloseEarly:
    """The rank closes its channel and is done, some iterations before the others."""

    def __call__(self, scene: Scene) -> None:
        scene.strike()
        scene.stack.close()
        raise LeaveError


@dataclass(frozen=True)
class CloseMeanwhile:
    """Another thread closes the channel, after some seconds."""

    after: float

    def __call__(self, scene: Scene) -> None:
        def close() -> None:
            assert scene.channel is not None
            scene.strike()
            scene.channel.close()

        threading.Timer(self.after, close).start()


@dataclass(frozen=True)
class LeaveOutstanding:
    """The interpreter shuts down with posts outstanding and, maybe, a thread that waits."""

    thread_waits: bool

    def __call__(self, scene: Scene) -> None:
        channel = scene.channel
        assert channel is not None
        # As a script has it; these go first when an interpreter shuts down.
        vars(sys.modules["__main__"])["channel"] = (channel, scene.stack.pop_all())
        if self.thread_waits:
            threading.Thread(target=_wait_for_ever, args=(channel,), daemon=True).start()
            time.sleep(0.2)
        scene.strike()
        raise LeaveError


def _wait_for_ever(channel: BoundedLagChannel) -> None:
    with suppress(ChannelClosedError):
        while True:
            channel.wait().release()


@dataclass(frozen=True)
class Fork:
    """A forked child tries to use the channel, drops it and ends."""

    def __call__(self, scene: Scene) -> None:
        scene.strike()
        child = os.fork()
        if child == 0:
            os._exit(0 if _is_harmless(scene) else 1)
        assert os.waitpid(child, 0)[1] == 0, "the forked child crashed or was let in"


def _is_harmless(scene: Scene) -> bool:
    channel, arrival = scene.channel, scene.arrival
    assert channel is not None and arrival is not None
    refused = 0
    for use in (partial(channel.post, [[]] * 3), channel.wait, partial(arrival.tensor, 0)):
        try:
            use()
        except ChannelClosedError as error:
            refused += "forked child" in str(error)
    channel.poison("nobody may hear this")
    channel.close()
    # The last references to the compiled objects, which free what they own.
    del arrival, use
    scene.arrival = None
    channel.native = None  # type: ignore[assignment]
    gc.collect()
    return refused == 3


@dataclass(frozen=True)
class Damage:
    """Overwrites a field of a message that rank 0 has not read yet."""

    field: str
    value: int
    victim: int = 0

    def __call__(self, scene: Scene) -> None:
        slot = Slot(scene, self.victim, _unread(scene))
        assert slot[self.field] != self.value
        slot[self.field] = self.value
        scene.strike()


@dataclass(frozen=True)
class Replay:
    """Puts an earlier message where a later one stands that the others have not read yet."""

    back: int

    def __call__(self, scene: Scene) -> None:
        unread = _unread(scene)
        for victim in range(scene.row.world):
            if victim != scene.rank:
                slot = Slot(scene, victim, unread)
                slot.copy_from(Slot(scene, victim, unread - self.back))
                assert slot["arrival"] == unread + 1 - self.back
        scene.strike()
        time.sleep(0.5)  # this rank will wait for the others, but has its deadline later


def _unread(scene: Scene) -> int:
    assert scene.channel is not None
    return scene.channel.native.completed


@dataclass(frozen=True)
class Mismatch:
    """The rank gives its channel another argument than the others."""

    argument: str
    value: Any

    def __call__(self, scene: Scene) -> None:
        scene.arguments[self.argument] = self.value
        scene.strike()


@dataclass(frozen=True)
class Patch:
    """The rank runs other code than the others."""

    target: str
    value: Any

    def __call__(self, scene: Scene) -> None:
        mock.patch(self.target, self.value).start()
        scene.strike()


def another_host() -> str:
    """Stands for torchrec_bls.collective.transport.rendezvous.host_identity."""
    return "elsewhere"


class _LargerGroup:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def size(self) -> int:
        return self._group.size() + 1


@dataclass(frozen=True)
class CountOneMore:
    """The rank believes that the group has one rank more."""

    def __call__(self, scene: Scene) -> None:
        scene.group = _LargerGroup(scene.group)  # type: ignore[assignment]
        scene.strike()


@dataclass(frozen=True)
class ShortMemory:
    """The rank sees a host that has hardly any memory left. Needs the right to mount."""

    kibibytes: int

    def __call__(self, scene: Scene) -> None:
        meminfo = scene.folder / "meminfo"
        meminfo.write_text(f"MemAvailable: {self.kibibytes} kB\nSwapFree: 0 kB\n")
        libc = ctypes.CDLL(None, use_errno=True)
        for failed in (
            libc.unshare(_CLONE_NEWNS),
            libc.mount(None, b"/", None, _MS_PRIVATE_ALL, None),
            libc.mount(os.fsencode(meminfo), b"/proc/meminfo", None, _MS_BIND, None),
        ):
            if failed:
                raise OSError(ctypes.get_errno(), "cannot mount: run the tests as root")
        scene.strike()


@dataclass(frozen=True)
class UseUpDescriptors:
    """The rank opens as many files as it may."""

    def __call__(self, scene: Scene) -> None:
        scene.strike()
        limit = 256
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        try:
            while True:
                os.open("/dev/null", os.O_RDONLY)
        except OSError:
            pass


@dataclass(frozen=True)
class SignalStore:
    """Kills or stops the process that serves the store."""

    signal: signal.Signals

    def __call__(self, scene: Scene) -> None:
        pid = int((scene.folder / "store pid").read_text())
        scene.strike()
        os.kill(pid, self.signal)

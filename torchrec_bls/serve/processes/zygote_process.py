"""A process that has the model warmed up, and becomes workers by forks.

A worker begins in some hundredths of a second: it imports, builds, compiles and measures nothing.
The zygote itself answers nobody. It follows new versions, so that its children begin with the
newest one, and a keeper's successor finds the tables even if all workers have died.
"""

import gc
import logging
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from select import select
from typing import TYPE_CHECKING, NoReturn

from torchrec_bls.errors import named
from torchrec_bls.serve.channel import Attach, Channel, Failed, Fork, Ready, pair
from torchrec_bls.serve.processes.background import give_way
from torchrec_bls.serve.processes.leaving import leave
from torchrec_bls.serve.processes.names import name_process
from torchrec_bls.serve.processes.plan import Plan

if TYPE_CHECKING:
    from torchrec_bls.serve.processes.served import Served

_Life = Callable[[str, Channel], None]
# Seconds between two looks at the state of the tables.
_LOOK = 0.1
# Seconds that it may take to end.
_ENDING = 5.0
_log = logging.getLogger(__name__)


class ZygoteProcess:
    """Runs a zygote beside this process.

    Args:
        plan: what it makes.
        beside: whether workers answer meanwhile, to whom it gives way.

    Attributes:
        channel: connection to it. It is told once that tables can be attached to. It says when it
            can be forked, or why not.
        began: moment of its begin, in seconds of `time.monotonic()`.
    """

    def __init__(self, plan: Plan, *, beside: bool) -> None:
        self.began = time.monotonic()
        self.channel, there = pair()
        with there:
            context = multiprocessing.get_context("spawn")
            self._process = context.Process(
                target=_run, args=(there, plan, beside), name="torchrec_bls zygote"
            )
            self._process.start()

    def fork(self, name: str) -> Channel:
        """Makes a worker. Returns the connection to it, which ends when the worker does, or at once
        if there is none.

        Args:
            name: name of the worker.
        """
        here, there = pair()
        with there:
            self.channel.send(Fork(name), there)
        return here

    def how_it_ended(self) -> str:
        """Returns that it has ended, and with which status."""
        self._process.join(_ENDING)
        return f"has ended with status {self._process.exitcode}"

    def close(self) -> None:
        """Ends it. Its workers go on."""
        self.channel.close()
        self._process.join(_ENDING)
        if self._process.is_alive():  # it makes the model
            self._process.kill()
            self._process.join(_ENDING)


def _run(end: socket.socket, plan: Plan, beside: bool) -> None:
    """Makes the model, and forks workers until the supervisor ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("torchrec_bls").setLevel(logging.INFO)
    name_process("zygote")
    channel = Channel(end)
    try:
        served = _made(plan, channel, beside)
    except EOFError:
        return
    except Exception as error:
        _log.error("the model can't be served", exc_info=error)
        channel.send(Failed(str(error) if isinstance(error, ValueError) else named(error)))
        return
    # Here, so that no worker has to.
    from torchrec_bls.serve.processes.worker import Worker

    def become_worker(name: str, to_supervisor: Channel) -> None:
        channel.close()
        Worker(name, served, plan, to_supervisor).run()

    # What is there now stays: a look at all of it would take longer than a deadline.
    gc.collect()
    gc.freeze()
    channel.send(Ready())
    try:
        while True:
            if select([channel.socket], [], [], _LOOK)[0]:
                message, sockets = channel.receive()
                if isinstance(message, Fork):
                    _fork(message.name, Channel(*sockets), become_worker)
            served.take_newest()
    except EOFError:
        leave()


def _made(plan: Plan, channel: Channel, beside: bool) -> "Served":
    """Makes the model once tables can be attached to. A thread of its own does so if it is to give
    way, since the children of this process, workers, are not."""
    if not beside:
        return _make(plan, channel)
    with ThreadPoolExecutor(1, initializer=give_way) as own:
        return own.submit(_make, plan, channel).result()


def _make(plan: Plan, channel: Channel) -> "Served":
    import torch

    from torchrec_bls.serve.processes.served import built, warmed_up

    # Of one thread, so that batches take as long as predicted beside other processes.
    torch.set_num_threads(1)
    model = built(plan)
    message, _ = channel.receive()
    assert isinstance(message, Attach)
    return warmed_up(plan, model)


def _fork(name: str, to_supervisor: Channel, become_worker: "_Life") -> None:
    """Makes a worker, which is the supervisor's child: so its end is seen with its status, and it
    outlives the zygote."""
    try:
        child = os.fork()
    except OSError as error:  # no memory, for now: the supervisor tries again
        _log.warning("worker %s can't be started: %s", name, error)
    else:
        if not child:
            _live(name, to_supervisor, become_worker)
        os.waitpid(child, 0)
    finally:
        to_supervisor.close()


def _live(name: str, to_supervisor: Channel, become_worker: "_Life") -> NoReturn:
    status = 1
    try:
        if os.fork():
            os._exit(0)
        become_worker(name, to_supervisor)
        status = 0
    except BaseException:
        _log.exception("worker %s has failed", name)
    finally:
        # Not as the zygote would end: what that is to undo is not this process's.
        logging.shutdown()
        os._exit(status)

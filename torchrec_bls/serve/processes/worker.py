"""A process that answers requests. It is forked with a model that is warmed up."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from torchrec_bls.serve.access_log import AccessLog
from torchrec_bls.serve.arrivals import stamped
from torchrec_bls.serve.channel import Beat, Begun, Channel
from torchrec_bls.serve.connections import connections
from torchrec_bls.serve.desk import Desk
from torchrec_bls.serve.engine import Engine
from torchrec_bls.serve.grpc_service import GrpcService
from torchrec_bls.serve.observer import Observer, WorkCollector
from torchrec_bls.serve.places import address, shared
from torchrec_bls.serve.processes.names import name_process
from torchrec_bls.serve.processes.plan import Plan
from torchrec_bls.serve.processes.served import Served
from torchrec_bls.serve.rest import RestApplication
from torchrec_bls.serve.serving_facts import ServingFacts
from torchrec_bls.serve.status import Refreshes, Status

# Seconds between two beats, and two looks at the state of the tables.
_LOOK = 0.1
# Seconds that requests may take to end when the worker is stopped.
_DRAINING = 10
# Without a front: seconds in which none may come before the worker stops, and that it waits at most
# for these.
_QUIET, _UNREST = 0.1, 1.0
# Seconds that a connection is kept without a request.
_KEPT = 75
_BACKLOG = 2048
_log = logging.getLogger(__name__)


class Worker:
    """Answers requests until the supervisor ends, or the process gets SIGTERM.

    Args:
        name: name of the worker.
        served: the model.
        plan: what it does.
        channel: connection to the supervisor.
    """

    def __init__(self, name: str, served: Served, plan: Plan, channel: Channel) -> None:
        name_process(f"worker {name}")
        channel.send(Begun(os.getpid()))
        self._name = name
        self._served = served
        self._places = plan.places
        self._channel = channel
        self._status = Status(Refreshes(), 0, 0, {})
        self._is_full = False
        observer = Observer(served.state)
        self._engine = Engine(
            served.calls, served.inputs, served.predictor, plan.contract, observer
        )
        observer.add(
            WorkCollector(
                lambda: self._engine.waiting,
                lambda: served.predictor.costs,
                lambda: served.calls.seconds,
                lambda: self._status,
            )
        )
        self._facts = ServingFacts(
            plan.name,
            served.outputs,
            self._engine,
            observer,
            served.state,
            lambda: self._status,
            name,
            plan.places,
        )
        log = AccessLog() if plan.access_log else None
        self._desk = Desk(self._engine, observer, log, has_front=plan.places.front)

    def run(self) -> None:
        """Answers requests.

        Raises:
            Exception: what has ended the batches.
        """
        # Ctrl-C of a terminal is for all of its processes. The supervisor tells this one.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        uvloop.run(self._run())

    async def _run(self) -> None:
        # A child of a fork follows new versions from its first batch on.
        self._served.calls.answered([self._served.sample])
        server = _Server(self._uvicorn_config(), lambda: self._channel.send(Beat()))
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, server.end)
        loop.add_reader(self._channel.socket, self._receive, server)
        tasks = [asyncio.create_task(each) for each in (self._engine.run(), self._watch())]
        for task in tasks:
            task.add_done_callback(lambda _: server.end())
        try:
            with ExitStack() as stack:
                await self._answer(server, stack)
            for task in tasks:
                if task.done():
                    task.result()  # raises what has ended it
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _answer(self, server: "_Server", stack: ExitStack) -> None:
        listeners = [stack.enter_context(_bound(self._places.http(self._name)))]
        if not self._places.front:
            outside = shared(self._places.host, self._places.port)
            listeners.append(stamped(stack.enter_context(outside)))
        grpc_server = self._grpc_server()
        if grpc_server is not None:
            await grpc_server.start()

        async def stop() -> None:
            await server.ending.wait()
            if not self._places.front:
                # gRPC cancels what arrives when it has begun to stop. A front sends nothing now.
                await self._desk.await_quiet(_QUIET, _UNREST)
            server.should_exit = True
            if grpc_server is not None:
                await grpc_server.stop(_DRAINING)

        await asyncio.gather(server.serve(sockets=listeners), stop())

    def _grpc_server(self) -> Any:
        if self._places.grpc_port is None:
            return None
        service = GrpcService(self._desk, self._facts)
        if self._places.front:
            return service.server(f"unix:{self._places.grpc(self._name)}")
        return service.server(address(self._places.host, self._places.grpc_port))

    def _uvicorn_config(self) -> uvicorn.Config:
        return uvicorn.Config(
            RestApplication(self._desk, self._facts),
            http=connections(self._engine.arrivals),
            ws="none",
            lifespan="off",
            access_log=False,
            # A caller's mistakes are not worth a line each.
            log_level="error",
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEPT,
            timeout_graceful_shutdown=_DRAINING,
            backlog=_BACKLOG,
        )

    def _receive(self, server: "_Server") -> None:
        for message in self._channel.received():
            if message is None:
                asyncio.get_running_loop().remove_reader(self._channel.socket)
                server.end()
            else:
                self._status = message

    async def _watch(self) -> None:
        """Follows the state of the tables, and tells the supervisor that the loop runs and, where a
        front gives it requests, that it can accept them."""
        while True:
            standing = self._served.standing()
            self._engine.drained_for = standing.drained_for
            if standing.is_behind and not self._engine.waiting and not standing.drained_for:
                # Batches change versions. Who asks for the new one alone would never get it.
                self._engine.ask_nothing(self._served.sample)
            await asyncio.sleep(_LOOK)
            # Callers without a front find another worker, and those that are connected go on.
            if not self._places.front or self._has_room():
                self._channel.send(Beat())

    def _has_room(self) -> bool:
        """Returns whether there is a descriptor for one more connection. On one that nobody accepts
        a request waits for ever, and the front takes the worker for a slow one."""
        try:
            os.close(os.dup(self._channel.socket.fileno()))
        except OSError as error:
            if not self._is_full:
                _log.warning(
                    "worker %s can accept no connection: %s; allow more open files: ulimit -n, "
                    "LimitNOFILE of a systemd unit, --ulimit nofile of a container",
                    self._name,
                    error,
                )
            self._is_full = True
            return False
        self._is_full = False
        return True


class _Server(uvicorn.Server):
    """An HTTP server that leaves signals to its owner.

    Args:
        config: its configuration.
        listens: function that is called once it listens.

    Attributes:
        ending: whether it was told to end.
    """

    def __init__(self, config: uvicorn.Config, listens: Callable[[], object]) -> None:
        super().__init__(config)
        self.ending = asyncio.Event()
        self._listens = listens

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listens()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        has_ended = await super().on_tick(counter)
        if self.ending.is_set():
            # Who asks again does so through another connection.
            self.server_state.default_headers = [(b"connection", b"close")]
        return has_ended

    def end(self) -> None:
        """Has callers leave. Who sets `should_exit` has it stop."""
        self.ending.set()


def _bound(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)  # of a worker that has ended
    made = socket.socket(socket.AF_UNIX)
    try:
        made.bind(os.fspath(path))
    except BaseException:
        made.close()
        raise
    return made

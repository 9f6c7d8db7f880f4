"""A service: one process that answers requests, and one that keeps the tables."""

import asyncio
import gc
import logging
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
import uvicorn
import uvloop
from torch import nn

from torchrec_bls.direct.offers.attach import attach
from torchrec_bls.direct.serving.publishing import serving_state
from torchrec_bls.errors import named
from torchrec_bls.serve.access_log import AccessLog
from torchrec_bls.serve.arrivals import stamped
from torchrec_bls.serve.compiled import Measured, compile_if_faster
from torchrec_bls.serve.connections import connections
from torchrec_bls.serve.contract import Contract
from torchrec_bls.serve.desk import Desk
from torchrec_bls.serve.engine import Engine
from torchrec_bls.serve.grpc_service import GrpcService
from torchrec_bls.serve.inputs import Features, ModelInputs, features_in
from torchrec_bls.serve.keeper_process import KeeperProcess, Keeping
from torchrec_bls.serve.model_calls import ModelCalls, made_up, measured
from torchrec_bls.serve.observer import Observer, WorkCollector
from torchrec_bls.serve.predictor import Predictor
from torchrec_bls.serve.rest import RestApplication
from torchrec_bls.serve.serving_facts import ServingFacts

# Seconds between two looks at the keeper and at the state of the tables.
_LOOK = 0.1
# Seconds that requests may take to end when the service is stopped.
_DRAINING = 10
# Seconds that a connection is kept without a request.
_KEPT = 75
_BACKLOG = 2048
_log = logging.getLogger(__name__)


class Service:
    """Serves a model over HTTP and gRPC until the process gets SIGTERM or SIGINT.

    Args:
        build: function that returns the model, not sharded, which another process can import. Its
            forward takes a KeyedJaggedTensor, or dense features and one. Its tables are float or
            quantized, and may be on the device "meta".
        checkpoint: path of a checkpoint with all weights, see `keeper`.
        contract: what is promised to callers.
        watch: directory whose new checkpoints are served as they come, see `watch`. None: none.
        drain: whether a version is let go of before the next one is made, on a host that can't hold
            two. Requests are refused meanwhile.
        name: name of the model in requests. None: the last name of the module of `build`.
        host: address that the service listens at.
        port: port for HTTP.
        grpc_port: port for gRPC. None: no gRPC.
        path: path of the keeper's socket, so that other processes can attach. None: one in a
            folder that is deleted at the end.
        dense_features: number of the model's dense features. None: it is found by calls.
        compile: whether the dense part is compiled where that makes batches faster, which takes
            a minute at the first start. The code is kept in a folder beside the checkpoint.
        access_log: whether a line is written for each request.

    Raises:
        ValueError: an argument is not possible.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        checkpoint: str | os.PathLike[str],
        *,
        contract: Contract | None = None,
        watch: str | os.PathLike[str] | None = None,
        drain: bool = False,
        name: str | None = None,
        host: str = "127.0.0.1",
        port: int = 8000,
        grpc_port: int | None = 8001,
        path: str | os.PathLike[str] | None = None,
        dense_features: int | None = None,
        compile: bool = True,
        access_log: bool = False,
    ) -> None:
        if "<" in getattr(build, "__qualname__", "<"):
            raise ValueError(
                f"build is {build!r}, but must be a function at the top of a module: the process "
                "that keeps the tables imports it"
            )
        self._build = build
        self._checkpoint = os.fsdecode(checkpoint)
        self._contract = contract or Contract()
        self._watch = None if watch is None else os.fsdecode(watch)
        self._drain = drain
        self._name = name or build.__module__.rpartition(".")[2]
        if "/" in self._name:
            raise ValueError(f"name is '{self._name}', but no path has a '/' in a name")
        self._host = host
        self._port = port
        self._grpc_port = grpc_port
        self._path = None if path is None else os.fsdecode(path)
        self._dense_features = dense_features
        self._compile = compile
        self._access_log = access_log

    def run(self) -> None:
        """Serves until the process is told to end.

        Raises:
            ValueError: the model can't be served.
            RuntimeError: the model can't be built, or its tables can't be loaded.
            OSError: a port is taken.
        """
        # As the other signal: what was begun is undone also while tables are loaded.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            self._run()

    def _run(self) -> None:
        # Of one thread, so that batches take as long as predicted beside other processes.
        torch.set_num_threads(1)
        with _bound(self._host, self._port, "--port") as listener, ExitStack() as stack:
            if self._grpc_port is not None:
                # Its library listens once tables are loaded, which may take minutes.
                with _bound(self._host, self._grpc_port, "--grpc-port"):
                    pass
            path = stack.enter_context(_socket_path(self._path))
            keeping = Keeping(
                self._build,
                self._checkpoint,
                path,
                self._watch,
                self._drain,
                self._dense_features,
            )
            with KeeperProcess(keeping) as keeper:
                model = self._built()
                features, is_weighted = features_in(model)
                keeper.wait()
                attach(model, path)
                calls = ModelCalls(model, [each.name for each in features], self._dense_features)
                inputs = ModelInputs(
                    features, calls.dense_columns, is_weighted, self._contract.max_samples
                )
                times = self._measured(calls, inputs)
                predictor = Predictor(times)
                _log.info(
                    "a batch takes %.2f ms, %.1f us more for each sample and %.2f us for each id",
                    predictor.costs.batch * 1e3,
                    predictor.costs.sample * 1e6,
                    predictor.costs.id * 1e6,
                )
                # What is there now stays: a look at all of it would take longer than a deadline.
                gc.collect()
                gc.freeze()
                try:
                    uvloop.run(self._serve(model, calls, inputs, predictor, keeper, listener))
                finally:
                    gc.unfreeze()  # else nanobind reports objects of triton as leaked

    def _measured(self, calls: ModelCalls, inputs: ModelInputs) -> Measured:
        def measure() -> Measured:
            return list(measured(calls, inputs))

        if not self._compile:
            return measure()
        times, text = compile_if_faster(calls.model, measure, self._checkpoint)
        _log.info("%s", text)
        return times

    def _built(self) -> nn.Module:
        try:
            return self._build().eval()
        except Exception as error:
            place = f"{self._build.__module__}:{self._build.__qualname__}"
            _log.exception("%s raised", place)
            raise RuntimeError(
                f"the model can't be built: {place} raised {named(error)}"
            ) from error

    async def _serve(
        self,
        model: nn.Module,
        calls: ModelCalls,
        inputs: ModelInputs,
        predictor: Predictor,
        keeper: KeeperProcess,
        listener: socket.socket,
    ) -> None:
        observer = Observer(lambda: serving_state(model))
        engine = Engine(calls, inputs, predictor, self._contract, observer)
        rows = [each.rows for each in inputs.features]
        sample = made_up(1, 1, np.array(rows), inputs.dense_columns, inputs.is_weighted)
        outputs = {name: each.shape[1:] for name, each in calls.answered([sample]).items()}
        observer.add(
            WorkCollector(
                lambda: engine.waiting,
                lambda: predictor.costs,
                lambda: calls.seconds,
                lambda: keeper.refreshes,
            )
        )
        facts = ServingFacts(
            self._name,
            outputs,
            engine,
            observer,
            lambda: serving_state(model),
            lambda: keeper.refreshes,
        )
        desk = Desk(engine, observer, AccessLog() if self._access_log else None)
        server = _Server(
            uvicorn.Config(
                RestApplication(desk, facts),
                http=connections(engine.arrivals),
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
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.end)
        grpc_server = None
        if self._grpc_port is not None:
            grpc_server = GrpcService(desk, facts).server(_place(self._host, self._grpc_port))
            await grpc_server.start()
            _log.info("serving gRPC at %s", _place(self._host, self._grpc_port))
        work = [
            asyncio.create_task(engine.run()),
            asyncio.create_task(_watch(model, engine, keeper, sample)),
        ]
        for task in work:
            task.add_done_callback(lambda _: server.end())
        place = _place(self._host, listener.getsockname()[1])
        _log.info(
            "serving model '%s' at http://%s in version %s", self._name, place, engine.version
        )
        try:
            await server.serve(sockets=[listener])
            if grpc_server is not None:
                await grpc_server.stop(_DRAINING)
            for task in work:
                if task.done():
                    task.result()  # raises what has ended it
        finally:
            for task in work:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


class _Server(uvicorn.Server):
    """An HTTP server that leaves signals to its owner."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        self.should_exit = True


async def _watch(model: nn.Module, engine: Engine, keeper: KeeperProcess, sample: Features) -> None:
    """Follows the state of the tables and of the process that keeps them."""
    while True:
        state = serving_state(model)
        engine.drained_for = state.drained_for
        if state.serial < state.announced_serial and not engine.waiting and not state.drained_for:
            # Batches change versions. Who asks for the new one alone would never get it.
            engine.ask_nothing(sample)
        keeper.look()
        await asyncio.sleep(_LOOK)


@contextmanager
def _bound(host: str, port: int, option: str) -> Iterator[socket.socket]:
    """Yields a socket that is bound, so that a port that is taken is found before all else. Who
    connects before the service listens is refused at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        cause = getattr(error, "strerror", None) or error
        raise OSError(
            f"cannot listen at {_place(host, port)}: {cause}. Give another port ({option}), or "
            "address (--host)"
        ) from error
    with listener:
        yield stamped(listener)


def _place(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextmanager
def _socket_path(given: str | None) -> Iterator[str]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="torchrec-bls-") as folder:
        yield str(Path(folder) / "tables")

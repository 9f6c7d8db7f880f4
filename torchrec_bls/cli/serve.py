"""The sub-command `torchrec-bls serve`: an endpoint of a model."""

import argparse
import importlib
import logging
import resource
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torchrec_bls.cli.help import examples

_MIB = 1 << 20


def add_command(commands: Any) -> None:
    """Adds the sub-command to a command's parser."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP and gRPC, each request within its deadline",
        description="Serves a model by the Open Inference Protocol v2. A request is answered by "
        "its deadline, or refused early. A process of its own keeps the tables, and refreshes them "
        "from a directory. GET / shows how the service does, GET /v2/models/NAME what a request "
        "has to bring. SIGTERM and Ctrl-C end it. There is no encryption and no authentication: "
        "put a proxy in front. Needs the extra 'serve'. Exit status 1: the model can't be served.",
        epilog=examples(
            "serve --demo",
            "serve ranker:build --checkpoint checkpoints/step-1 --watch checkpoints",
            "serve ranker:build --checkpoint model.pt --workers 4 --front haproxy --deadline-ms 10",
        ),
    )
    model = parser.add_argument_group("model").add_argument
    model(
        "model",
        nargs="?",
        metavar="MODULE:FUNCTION",
        help="function without arguments that returns the model, not sharded; its tables may be "
        'quantized, and on the device "meta"',
    )
    model(
        "--checkpoint",
        type=Path,
        metavar="PATH",
        help="all weights of the model: a folder of torch.distributed.checkpoint, or a file of "
        "torch.save or safetensors",
    )
    model(
        "--demo",
        action="store_true",
        help="serve a model that comes with the package, with random weights, instead",
    )
    model("--name", help="name of the model in requests (default: that of its module)")
    model(
        "--dense-features",
        type=int,
        metavar="N",
        help="dense features of the model (default: found by calls)",
    )
    model(
        "--no-compile",
        action="store_true",
        help="leave the dense part as it is; else it is compiled, and TorchRec's DLRM takes fewer "
        "steps, where that makes batches faster, which takes a minute at the first start",
    )
    promise = parser.add_argument_group("promise").add_argument
    promise(
        "--deadline-ms",
        type=float,
        default=20.0,
        metavar="MS",
        help="deadline of a request that has none of its own (default: %(default)g)",
    )
    promise(
        "--max-samples",
        type=int,
        default=2048,
        metavar="N",
        help="samples that a request may have (default: %(default)s)",
    )
    promise(
        "--max-body-mib",
        type=float,
        default=16.0,
        metavar="MIB",
        help="size that the body of a request may have (default: %(default)g)",
    )
    refreshes = parser.add_argument_group("refreshes").add_argument
    refreshes(
        "--watch",
        type=Path,
        metavar="DIR",
        help="serve each new checkpoint or delta of this directory once it is complete and has "
        "passed a made-up request",
    )
    refreshes(
        "--drain",
        action="store_true",
        help="let go of a version before the next one is made, on a host without memory for two; "
        "requests are refused meanwhile",
    )
    processes = parser.add_argument_group("processes").add_argument
    processes(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="processes that answer requests, each of which takes a core (default: %(default)s)",
    )
    processes(
        "--front",
        choices=("none", "haproxy"),
        default="none",
        help="haproxy: a proxy in front of the workers, which gives the requests of one that dies "
        "to another one; needs the extra 'front'. none: workers share the ports (default: "
        "%(default)s)",
    )
    place = parser.add_argument_group("where").add_argument
    place("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    place("--port", type=int, default=8000, help="port for HTTP (default: %(default)s)")
    place(
        "--grpc-port",
        type=int,
        default=8001,
        metavar="PORT",
        help="port for gRPC, 0 for none (default: %(default)s)",
    )
    place(
        "--socket",
        type=Path,
        metavar="PATH",
        help="socket through which other processes of the host attach to the tables",
    )
    place(
        "--access-log",
        action="store_true",
        help="write a line for each request to standard error, JSON",
    )
    parser.set_defaults(command=_serve)


def _serve(options: argparse.Namespace) -> int:
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("torchrec_bls").setLevel(logging.INFO)
    try:
        _run_service(options)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"torchrec-bls serve: {error}", file=sys.stderr)
        return 1
    return 0


def _run_service(options: argparse.Namespace) -> None:
    if options.demo == (options.model is not None):
        raise ValueError("give MODULE:FUNCTION, such as 'ranker:build', or --demo")
    if options.demo == (options.checkpoint is not None):
        raise ValueError("give --checkpoint PATH with MODULE:FUNCTION, and not with --demo")
    # Each connection takes a descriptor. The usual limit of 1,024 is for programs that call select.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    _import_package()
    from torchrec_bls.serve.contract import Contract
    from torchrec_bls.serve.service import Service

    with ExitStack() as stack:
        if options.demo:
            from torchrec_bls.serve import demo

            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="torchrec-bls-"))
            build: Callable[[], Any] = demo.build
            checkpoint = Path(folder) / "demo.pt"
            demo.write_checkpoint(str(checkpoint))
        else:
            build, checkpoint = _function(options.model), options.checkpoint
        Service(
            build,
            checkpoint,
            contract=Contract(
                options.deadline_ms, options.max_samples, int(options.max_body_mib * _MIB)
            ),
            watch=options.watch,
            drain=options.drain,
            name=options.name,
            host=options.host,
            port=options.port,
            grpc_port=options.grpc_port or None,
            path=options.socket,
            dense_features=options.dense_features,
            compile=not (options.no_compile or options.demo),
            access_log=options.access_log,
            workers=options.workers,
            front=options.front,
        ).run()


def _import_package() -> None:
    # The model's module may use the package, of which the command has imported no more than needed.
    package = sys.modules["torchrec_bls"]
    if "__all__" not in vars(package):
        assert package.__spec__ is not None and package.__spec__.loader is not None
        package.__spec__.loader.exec_module(package)
    from torchrec_bls._contract import check_torchrec

    check_torchrec()


def _function(place: str) -> Callable[[], Any]:
    module, colon, name = place.partition(":")
    if not (module and colon and name):
        raise ValueError(f"'{place}' is no MODULE:FUNCTION, such as 'ranker:build'")
    sys.path.insert(0, "")  # as `python -m` has it
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports another one that is not
        raise ValueError(
            f"no module '{error.name}' in {Path.cwd()} or among the installed packages: change to "
            "the folder that has it, or set PYTHONPATH"
        ) from None
    if not callable(found):
        raise ValueError(f"module '{module}' has no function '{name}'")
    function: Callable[[], Any] = found
    return function

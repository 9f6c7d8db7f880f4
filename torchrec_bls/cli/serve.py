"""The sub-command `torchrec-bls serve`: an endpoint of a model."""

import argparse
import importlib
import logging
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any


def add_command(commands: Any) -> None:
    """Adds the sub-command to a command's parser."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP and gRPC, each request within its deadline",
        description="Serves a model by the Open Inference Protocol v2. A request is answered by "
        "its deadline, or refused early. A process of its own keeps the tables, and refreshes them "
        "from a directory. Needs the extra 'serve'. Exit status 1: the model can't be served.",
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODULE:FUNCTION", help="function that returns the model")
    add("--checkpoint", type=Path, metavar="PATH", help="weights of the model")
    add("--demo", action="store_true", help="serve a model of the package with random weights")
    add("--watch", type=Path, metavar="DIR", help="serve new checkpoints of a directory")
    add("--drain", action="store_true", help="hold no two versions at once, and refuse meanwhile")
    add("--deadline-ms", type=float, default=20.0, help="deadline of requests without one (20)")
    add("--max-samples", type=int, default=2048, help="samples of a request, at most (2048)")
    add("--max-body-mib", type=float, default=16.0, help="body of a request, at most (16)")
    add("--name", help="name of the model in requests (default: of its module)")
    add("--host", default="127.0.0.1", help="address to listen at (127.0.0.1)")
    add("--port", type=int, default=8000, help="port for HTTP (8000)")
    add("--grpc-port", type=int, default=8001, help="port for gRPC (8001); 0: no gRPC")
    add("--socket", type=Path, metavar="PATH", help="where other processes attach to the tables")
    add("--dense-features", type=int, help="dense features of the model (default: found)")
    add("--access-log", action="store_true", help="write a line for each request")
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
    # The model's module may use the package, of which the command has imported no more than needed.
    package = sys.modules["torchrec_bls"]
    assert package.__spec__ is not None and package.__spec__.loader is not None
    package.__spec__.loader.exec_module(package)
    if options.demo == (options.model is not None):
        raise ValueError("give MODULE:FUNCTION, or --demo")
    if options.demo == (options.checkpoint is not None):
        raise ValueError("give the weights of MODULE:FUNCTION as --checkpoint PATH")
    try:
        from torchrec_bls.serve.contract import Contract
        from torchrec_bls.serve.service import Service
    except ImportError as error:
        raise ImportError(
            f"{error}: the service needs more packages, pip install 'torchrec-bls[serve]'"
        ) from error
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
                options.deadline_ms, options.max_samples, int(options.max_body_mib * (1 << 20))
            ),
            watch=options.watch,
            drain=options.drain,
            name=options.name,
            host=options.host,
            port=options.port,
            grpc_port=options.grpc_port or None,
            path=options.socket,
            dense_features=options.dense_features,
            access_log=options.access_log,
        ).run()


def _function(place: str) -> Callable[[], Any]:
    module, colon, name = place.partition(":")
    if not colon or not name:
        raise ValueError(f"'{place}' is no MODULE:FUNCTION, such as 'ranker:build'")
    sys.path.insert(0, "")  # as `python -m` has it
    found = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise ValueError(f"module '{module}' has no function '{name}'")
    function: Callable[[], Any] = found
    return function

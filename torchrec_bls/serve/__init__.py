"""An endpoint of a model: requests over HTTP and gRPC, each answered by its deadline or refused.
It needs the packages of the extra "serve"."""

from importlib.util import find_spec

_PACKAGES = ("uvicorn", "httptools", "uvloop", "prometheus_client", "grpc", "tritonclient")

if _absent := [name for name in _PACKAGES if find_spec(name) is None]:
    raise ImportError(
        f"the service needs packages that are not installed ({', '.join(_absent)}): "
        "pip install 'torchrec-bls[serve]'"
    )

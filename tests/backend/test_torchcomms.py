"""The backend `bls` where TORCH_DISTRIBUTED_USE_TORCHCOMMS hands groups to TorchComms.

TorchComms is a package of its own and not on PyPI, where a placeholder has its name. So torch finds
that placeholder here, or a stand-in that says what TorchComms does of backends it hasn't got.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.processes import run_outcomes

PLACEHOLDER = {"__init__.py": 'raise ImportError("torchcomms can\'t be installed via PyPi")\n'}
STAND_IN = {
    "__init__.py": """
def is_backend_built(backend):
    return backend in ("gloo", "nccl")

def new_comm(backend, *arguments, **options):
    raise ModuleNotFoundError(f"failed to find backend {backend}")
""",
    "_comms.py": """
class _BackendWrapper:
    pass

def _is_backend_registered(backend):
    return False
""",
    "hooks.py": "class FlightRecorderHook:\n    pass\n",
}
# From 2.14 on torch gives TorchComms the backends that it knows, before that all of them.
MAKES_OTHER_BACKENDS = hasattr(distributed_c10d, "_torchcomms_handles_backend")


@pytest.fixture
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "1")


def install(files: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a package torchcomms in front of all others, also for the ranks."""
    package = folder / "torchcomms"
    package.mkdir()
    for name, text in files.items():
        (package / name).write_text(text)
    monkeypatch.syspath_prepend(str(folder))


def use_the_group(rank: int) -> bool:
    """Exchanges through the channel and by gloo, in the default group and in another one."""
    for group in (dist.group.WORLD, dist.new_group(backend="bls")):
        received = torch.empty(2)
        dist.all_to_all_single(received, torch.full((2,), float(rank)), group=group)
        assert received.tolist() == [0.0, 1.0]
        dist.all_reduce(received, group=group)
        assert received.tolist() == [0.0, 2.0]
        parts = [torch.empty(1), torch.empty(1)] if rank == 0 else None
        dist.gather(torch.tensor([float(rank)]), parts, group=group)
        assert parts is None or torch.cat(parts).tolist() == [0.0, 1.0]
        objects: list[object] = [None, None]
        dist.all_gather_object(objects, f"rank {rank}", group=group)
        assert objects == ["rank 0", "rank 1"]
        assert group.channel is not None
    use = getattr(distributed_c10d, "_use_torchcomms_enabled", lambda: False)
    return bool(use())


@pytest.mark.slow
def test_the_variable_without_the_package_changes_nothing(
    switched_on: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(PLACEHOLDER, tmp_path, monkeypatch)
    for outcome in run_outcomes(2, use_the_group, fresh_interpreters=True, backend="cpu:bls"):
        assert (outcome.error, outcome.value) == (None, False), outcome


@pytest.mark.slow
def test_with_the_package_it_works_or_the_import_warns(
    switched_on: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    install(STAND_IN, tmp_path, monkeypatch)
    outcomes = run_outcomes(2, use_the_group, fresh_interpreters=True, backend="cpu:bls")
    warned = "Unset it where backend 'bls' is used" in capfd.readouterr().err
    assert warned is not MAKES_OTHER_BACKENDS
    for outcome in outcomes:
        if MAKES_OTHER_BACKENDS:
            assert (outcome.error, outcome.value) == (None, True), outcome
        else:
            assert outcome.error == "ModuleNotFoundError", outcome

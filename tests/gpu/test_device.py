"""GPUs that are not there are refused, with what to do."""

from __future__ import annotations

import pytest
import torch

from torchrec_bls.direct.gpu import device
from torchrec_bls.direct.gpu.capture import Capture
from torchrec_bls.direct.gpu.device import CudaGpu, gpu_of


@pytest.fixture(autouse=True)
def no_gpu_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_gpus", {})
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ValueError, match=r"'cuda:0'.*built without CUDA: install.*get-started"):
        gpu_of(torch.device("cuda", 0))


def test_a_host_without_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"'cuda'.*no GPU here.*CUDA_VISIBLE_DEVICES.*MIG"):
        gpu_of(torch.device("cuda"))


def test_a_gpu_that_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match=r"'cuda:1': this process sees 1 GPUs.*torch.device\('cpu"):
        gpu_of(torch.device("cuda", 1))


def test_a_process_that_was_forked_too_late_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(ValueError, match="before this process was forked: start processes by"):
        gpu_of(torch.device("cuda", 0))


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="take Triton: python -m pip install triton"):
        gpu_of(torch.device("cuda", 0))


def test_only_captures_of_ours_have_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = CudaGpu.__new__(CudaGpu)
    gpu.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    capture = Capture(gpu)
    with pytest.raises(ValueError, match=r"by hand.*CapturedForward"), gpu.reading([]):
        pass
    with (
        pytest.raises(ValueError, match="by hand"),
        capture.warming_up(),  # on a stream that is not captured
        gpu.reading([]),
    ):
        pass
    with capture.running(), gpu.reading([]):
        pass
    with pytest.raises(ValueError, match="by hand"), gpu.reading([]):
        pass

"""How backward and communication slow each other down on one GPU, by the communication's CTAs.

LIBRA's Eqs. 5 and 6 say so for NCCL among GPUs. Here CTAs like NCCL's add two arrays into a third,
which is what a ring's step does in its own GPU's memory. No link limits them.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.optimize import curve_fit
from torch import nn

from benchmarks.harness import page, record
from benchmarks.harness.statistics import Spread, taking_turns

FULL: dict[str, Any] = {"ctas": [1, 2, 4, 8, 16, 32, 64], "batches": [512, 8192], "turns": 15}
QUICK = FULL | {"ctas": [1, 4, 16, 64], "turns": 3}
_LAYERS, _WIDTH = 16, 2048
_THREADS = 512  # of a CTA, as NCCL's
_FLOATS = 2**26  # far more than the second-level cache holds
_EXPONENT = 0.6  # the paper's fourth gamma

_KERNEL = """
extern "C" __global__ void __launch_bounds__(512) add(
    const float4* a, const float4* b, float4* out, int mib, int count) {
  __shared__ volatile char shared[48 * 1024];  // like NCCL's, less is left to other kernels
  if (count < 0) shared[threadIdx.x] = 1;  // never; the compiler keeps the array
  const long long pieces = (long long)mib << 16, all = (long long)gridDim.x * blockDim.x;
  const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (long long at = first; at < pieces; at += all) {
    const long long index = at & (count - 1);
    float4 x = a[index], y = b[index];
    out[index] = make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
  }
}
"""


class Gpu:
    """A backward of linear layers on one stream, and a stand-in for an all-reduce on another."""

    def __init__(self, batch: int) -> None:
        torch.backends.cuda.matmul.allow_tf32 = True
        self._arrays = torch.randn(3, _FLOATS, device="cuda").unbind()
        self._add = torch.cuda._compile_kernel(_KERNEL, "add")
        self._stream = torch.cuda.Stream(priority=-1)  # as DistributedDataParallel's for NCCL
        # A graph, since launches one by one take longer than small kernels.
        layers = [part for _ in range(_LAYERS) for part in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU())]
        model, captured_on = nn.Sequential(*layers).cuda(), torch.cuda.Stream()
        with torch.cuda.stream(captured_on):
            loss = model(torch.randn(batch, _WIDTH, device="cuda")).sum()
            gradients = partial(torch.autograd.grad, loss, [*model.parameters()], retain_graph=True)
            gradients()
            self._backward = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._backward, stream=captured_on):
                self._kept = gradients()

    def times_ms(self, ctas: int, mib: int, what: str) -> tuple[float, float]:
        """Milliseconds of a backward and of a sum, in an order: `what` is "sum, backward", say."""
        torch.cuda.synchronize()
        moments = {}
        for each in what.split(", "):
            stream = self._stream if each == "sum" else torch.cuda.current_stream()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                begin.record()
                if each == "sum":
                    arguments = (*self._arrays, mib, _FLOATS // 4)
                    self._add((ctas, 1, 1), (_THREADS, 1, 1), arguments)
                else:
                    self._backward.replay()
                end.record()
            moments[each] = begin, end
        torch.cuda.synchronize()
        ms = {each: begin.elapsed_time(end) for each, (begin, end) in moments.items()}
        return ms.get("backward", 0.0), ms.get("sum", 0.0)


def measure(batch: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Spreads by CTAs: of the backward, and of a MiB of the sum alone and beside a backward."""
    gpu, found = Gpu(batch), {}
    for _ in range(20):  # clocks go up
        alone_ms, _ = gpu.times_ms(1, 1, "backward")
    us = {}
    for ctas in settings["ctas"]:
        _, ms = gpu.times_ms(ctas, 16 * ctas, "sum")
        us[ctas] = 1e3 * ms / (16 * ctas)
    # The sum outlasts the backward, or has a quarter of its time; alone as much, for the same ends.
    long = {ctas: round(4e3 * alone_ms / us[ctas]) + 1 for ctas in us}
    short = {ctas: round(250 * alone_ms / us[ctas]) + 1 for ctas in us}
    samplers: dict[Any, Any] = {("backward", 0): lambda: gpu.times_ms(1, 1, "backward")[0]}
    for ctas in us:
        for what, mib, order in (
            ("backward", long[ctas], "sum, backward"),
            ("alone", short[ctas], "sum"),
            ("beside", short[ctas], "backward, sum"),
        ):
            samplers[what, ctas] = partial(_sample, gpu, ctas, mib, order, what)
    taken = taking_turns(samplers, settings["turns"], f"batch {batch}")
    for (what, ctas), samples in taken.items():
        found.setdefault(what, {})[str(ctas)] = Spread(samples)
    return {"batch": batch, **found}


def _sample(gpu: Gpu, ctas: int, mib: int, order: str, what: str) -> float:
    backward_ms, sum_ms = gpu.times_ms(ctas, mib, order)
    return backward_ms if what == "backward" else 1e3 * sum_ms / mib


def section(made: record.Record) -> str:
    parts = []
    for result in made["results"]["batches"]:
        alone_ms = result["backward"]["0"]["median"]
        ctas = [int(each) for each in result["alone"]]
        rates = [alone_ms / result["backward"][str(each)]["median"] for each in ctas]
        # Gigabytes a second of the result; three times as much passes the memory.
        alone, beside = (
            [2**20 / 1e3 / result[what][str(each)]["median"] for each in ctas]
            for what in ("alone", "beside")
        )
        five = _fit(lambda r, a1, a2: a1 - a2 * r, ctas, rates, (1.0, 0.001))
        six, six_beside = (
            _fit(_saturating, ctas, each, (each[-1],) * 2 + (0.1,)) for each in (alone, beside)
        )
        columns = zip(ctas, rates, five, alone, six, beside, six_beside, strict=True)
        rows = [
            [
                r,
                f"{rate:.3f}",
                f"{by5:.3f}",
                f"{q:.0f}",
                f"{by6:.0f}",
                f"{p:.0f}",
                f"{of6:.0f}",
                f"{rate + p / q:.2f}",
            ]
            for r, rate, by5, q, by6, p, of6 in columns
        ]
        header = [
            "CTAs",
            "backward's rate",
            "Eq. 5",
            "alone, GB/s",
            "Eq. 6",
            "beside, GB/s",
            "Eq. 6",
            "both together",
        ]
        parts.append(
            f"Batch {result['batch']:,}: a backward of {alone_ms:.1f} ms.\n\n"
            + page.table(header, rows)
        )
    return page.section(made, f"On one {made['results']['gpu']}.", *parts)


def _saturating(ctas: Any, g1: float, g2: float, g3: float) -> Any:
    return g1 - g2 * np.exp(-g3 * ctas**_EXPONENT)


def _fit(form: Any, ctas: Any, values: Any, start: tuple[float, ...]) -> Any:
    """What the form gives with parameters by least squares of relative errors."""
    where = np.array(ctas, dtype=float)
    return form(where, *curve_fit(form, where, values, start, sigma=values, maxfev=20_000)[0])


def main() -> None:
    parser = record.parser(__doc__, quick="fewer CTAs, three turns")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU: run it where torch.cuda.is_available()")
    settings = QUICK if arguments.quick else FULL
    before = record.environment()
    results = {
        "gpu": torch.cuda.get_device_name(),
        "batches": [measure(batch, settings) for batch in settings["batches"]],
    }
    record.publish(arguments.json, "libra_gpu", before, settings, results, section)


if __name__ == "__main__":
    main()

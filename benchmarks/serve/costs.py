"""What a request costs the service beside the model: CPU of requests of 32 candidates, one by one.

All of its processes count; their CPU without requests is taken off. The model's time is what the
worker itself reports.
"""

import functools
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import record
from benchmarks.harness.statistics import Spread
from benchmarks.serve import model, shape
from benchmarks.serve.encoding import encode
from benchmarks.serve.generator import Generator, Load
from benchmarks.serve.page import costs_section
from benchmarks.serve.scheduling import processor_s
from benchmarks.serve.service import GENERATOR_CORE, Service, served
from benchmarks.serve.traffic import Request

CANDIDATES = 32
FULL = {"rows": shape.ROWS, "rates": [50, 200, 400, 800], "run_s": 10.0, "repetitions": 3}
QUICK = {"rows": shape.QUICK_ROWS, "rates": [50], "run_s": 0.5, "repetitions": 1}


def of_32(request: Request, path: str) -> bytes:
    """Encodes a request with some of a request's candidates, or with some of them twice."""
    ids = request.values.reshape(shape.TABLES, -1)
    taken = np.arange(CANDIDATES) % ids.shape[1]
    whole = Request(
        request.dense[taken],
        ids[:, taken].reshape(-1),
        np.ones(shape.TABLES * CANDIDATES, dtype=np.int32),
    )
    return encode(whole, path=path, timeout_s=1.0)


def model_s(service: Service) -> float:
    """Seconds that the model has taken."""
    url = service.url.partition("/v2/")[0] + "/metrics"
    with urllib.request.urlopen(url, timeout=5) as reply:
        lines = reply.read().decode().splitlines()
    return next(
        float(line.split()[1]) for line in lines if line.startswith("torchrec_bls_model_seconds_t")
    )


def measure(service: Service, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """CPU of a request at each rate."""
    processes, run_s = service.processes, settings["run_s"]
    path = service.url.partition("127.0.0.1")[2].partition("/")
    load = Load(
        service.url,
        functools.partial(of_32, path=f"/{path[2]}"),
        settings["rows"],
        GENERATOR_CORE,
        1.0,
    )
    before = processor_s(processes)
    time.sleep(run_s)
    idle = (processor_s(processes) - before) / run_s
    results = []
    with Generator(load) as generator:
        generator.run(settings["rates"][0], run_s)
        for rate in settings["rates"]:
            whole, of_model = [], []
            for seed in range(settings["repetitions"]):
                before = processor_s(processes), model_s(service), time.monotonic()
                answered = generator.run(rate, run_s, seed)
                spent = processor_s(processes) - before[0]
                spent -= idle * (time.monotonic() - before[2])
                count = answered.in_time + answered.late
                whole.append(1e3 * spent / count)
                of_model.append(1e3 * (model_s(service) - before[1]) / count)
            beside = [all_of - own for all_of, own in zip(whole, of_model, strict=True)]
            results.append(
                {
                    "rate": rate,
                    "idle_cores": idle,
                    "request_ms": Spread(whole),
                    "model_ms": Spread(of_model),
                    "beside_ms": Spread(beside),
                }
            )
    return results


def main() -> None:
    arguments = record.parser(__doc__, quick="small tables, some seconds").parse_args()
    settings: dict[str, Any] = QUICK if arguments.quick else FULL
    before = record.environment()
    with tempfile.TemporaryDirectory(prefix="bls-serve-") as folder:
        checkpoint = Path(folder) / "checkpoint"
        rows = settings["rows"]
        model.write_checkpoint(checkpoint, rows)
        build = model.BUILDS[rows]["float"]
        with served(build, checkpoint, "--no-compile") as service:
            results = measure(service, settings)
    record.publish(arguments.json, "serving_costs", before, settings, results, costs_section)


if __name__ == "__main__":
    main()

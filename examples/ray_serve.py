"""Replicas of Ray Serve that read one copy of a model's tables.

    pip install 'torchrec-bls[serve]' 'ray[serve]'
    python examples/ray_serve.py --replicas 2

One actor of a host keeps the tables. Replicas on that host build the model without them and attach,
so that another replica costs the memory of its dense part alone. Then new weights come while
requests are answered, the keeper is killed, and weights come once more. Each answer is compared
with that of the whole model in the version that it names.

Ray Serve balances and restarts. What it does not know is which request will be late: for that see
`torchrec-bls serve`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from typing import Any

import numpy as np
import ray
import torch
from ray import serve
from torchrec import KeyedJaggedTensor

from torchrec_bls import Keeper, attach, keeper, version_of
from torchrec_bls.serve.demo import DENSE_FEATURES, FEATURES, Ranker, build

SAMPLES, DEADLINE_S = 32, 120.0
#: dense, [samples, 4] float32, and ids, [features, samples] int64.
Asked = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)
class Tables:
    """Owns the tables of a host. Ray starts another one if it dies, which takes them over from the
    replicas and loads nothing.

    Args:
        checkpoint: path of the first weights.
        path: path of the socket where replicas attach.
    """

    def __init__(self, checkpoint: str, path: str) -> None:
        self._keeper: Keeper = keeper(build, checkpoint, path, version="1").__enter__()

    def publish(self, checkpoint: str, version: str) -> None:
        """Has replicas answer with new weights."""
        self._keeper.publish(checkpoint, version=version)

    def pid(self) -> int:
        """Returns its process."""
        return os.getpid()


@serve.deployment
class Replica:
    """Answers requests.

    Args:
        path: path of the socket of the tables.
    """

    def __init__(self, path: str) -> None:
        torch.set_num_threads(1)
        self._model = build().eval()
        attach(self._model, path)

    def __call__(self, asked: Asked) -> tuple[np.ndarray[Any, Any], str, int]:
        """Returns scores, the version that they are of, and the process that made them."""
        scores = _scores(self._model, asked)
        return scores, version_of(self._model), os.getpid()


def _scores(model: torch.nn.Module, asked: Asked) -> np.ndarray[Any, Any]:
    dense, ids = (torch.from_numpy(each.copy()) for each in asked)
    lengths = torch.ones(ids.numel(), dtype=torch.int32)
    features = KeyedJaggedTensor(keys=list(FEATURES), values=ids.reshape(-1), lengths=lengths)
    with torch.inference_mode():
        return np.asarray(model(dense, features).numpy())


def made_up(seed: int) -> Asked:
    """Returns a request."""
    random = np.random.default_rng(seed)
    ids = np.stack([random.integers(rows, size=SAMPLES) for rows in FEATURES.values()])
    return random.random((SAMPLES, DENSE_FEATURES), dtype=np.float32), ids


def write_checkpoint(folder: str, version: str) -> tuple[str, torch.nn.Module]:
    """Writes weights, and returns their path and the whole model with them."""
    torch.manual_seed(int(version))
    whole = Ranker("cpu").eval()
    path = f"{folder}/{version}.pt"
    torch.save(whole.state_dict(), path)
    return path, whole


class Caller:
    """Asks, and compares the answers.

    Args:
        replicas: handle of the deployment.
        whole: whole models by their versions.
    """

    def __init__(self, replicas: Any, whole: dict[str, torch.nn.Module]) -> None:
        self._replicas = replicas
        self._whole = whole
        self._asked = 0

    def ask_until(self, version: str, count: int) -> set[int]:
        """Asks until so many answers are of a version. Returns the processes that gave these."""
        found: set[int] = set()
        deadline = time.monotonic() + DEADLINE_S
        while count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answers of version {version} in {DEADLINE_S:g} s")
            self._asked += 1
            asked = made_up(self._asked)
            scores, named, process = self._replicas.remote(asked).result(timeout_s=DEADLINE_S)
            np.testing.assert_allclose(scores, _scores(self._whole[named], asked), atol=1e-6)
            if named == version:
                found.add(process)
                count -= 1
        print(f"version {version}: right answers of {len(found)} replicas", flush=True)
        return found


def main() -> None:
    """Serves, refreshes, kills the keeper, refreshes again."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--requests", type=int, default=50, help="of each version")
    options = parser.parse_args()
    ray.init(include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/tables"
        written = {each: write_checkpoint(folder, each) for each in ("1", "2", "3")}
        tables = Tables.remote(written["1"][0], path)
        first = ray.get(tables.pid.remote(), timeout=DEADLINE_S)
        deployment = Replica.options(
            num_replicas=options.replicas, ray_actor_options={"num_cpus": 0}
        )
        caller = Caller(
            serve.run(deployment.bind(path)), {each: whole for each, (_, whole) in written.items()}
        )
        caller.ask_until("1", options.requests)
        ray.get(tables.publish.remote(written["2"][0], "2"), timeout=DEADLINE_S)
        caller.ask_until("2", options.requests)
        ray.kill(tables, no_restart=False)
        caller.ask_until("2", options.requests)
        second = ray.get(tables.pid.remote(), timeout=DEADLINE_S)
        print(f"the keeper was killed: process {second} has followed {first}", flush=True)
        ray.get(tables.publish.remote(written["3"][0], "3"), timeout=DEADLINE_S)
        caller.ask_until("3", options.requests)
        serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()

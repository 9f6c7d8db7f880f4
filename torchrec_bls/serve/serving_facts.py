"""What callers may ask a service about itself."""

import time
from collections.abc import Callable, Iterable
from typing import Any

from torchrec_bls.direct.serving.serving_state import ServingState
from torchrec_bls.serve.engine import Engine
from torchrec_bls.serve.observer import Observer
from torchrec_bls.serve.openapi import PACKAGE_VERSION, openapi
from torchrec_bls.serve.outcomes import Outcome, RequestError, bad
from torchrec_bls.serve.page import page
from torchrec_bls.serve.places import Places
from torchrec_bls.serve.siblings import Report, metrics_of, reports
from torchrec_bls.serve.status import Status
from torchrec_bls.serve.tally import together


class ServingFacts:
    """The model that is served, its state and its counts.

    Args:
        name: name of the model in requests.
        outputs: shape of each of its outputs by name, without the samples.
        engine: engine that answers requests.
        observer: counts of requests.
        state: function that returns what the process serves.
        status: function that returns what the supervisor has said.
        worker: name of the worker.
        places: where the workers are.

    Attributes:
        name: see above.
    """

    def __init__(
        self,
        name: str,
        outputs: dict[str, tuple[int, ...]],
        engine: Engine,
        observer: Observer,
        state: Callable[[], ServingState],
        status: Callable[[], Status],
        worker: str,
        places: Places,
    ) -> None:
        self.name = name
        self._outputs = outputs
        self._engine = engine
        self._observer = observer
        self._state = state
        self._status = status
        self._worker = worker
        self._places = places
        self._began = time.time()

    def check_name(self, model: str) -> None:
        """Raises RequestError unless a model is the one that is served."""
        if model != self.name:
            raise RequestError(Outcome.UNKNOWN, f"no model '{model}' is served, but '{self.name}'")

    def check_outputs(self, asked: Iterable[str]) -> None:
        """Raises RequestError unless the model has all outputs of these names."""
        for name in asked:
            if name not in self._outputs:
                raise bad(f"the model has no output '{name}', but {sorted(self._outputs)}")

    def why_not_ready(self) -> str:
        """Returns why a proxy should send no requests here; empty if it should."""
        if self._status().is_leaving:  # it answers them all the same
            return "the service is about to end"
        drained_for = self._engine.drained_for
        return f"version '{drained_for}' is being made" if drained_for else ""

    def server_metadata(self) -> dict[str, Any]:
        """Returns what GET /v2 says."""
        return {
            "name": "torchrec-bls",
            "version": PACKAGE_VERSION,
            "extensions": ["binary_tensor_data", "schedule_policy"],
        }

    def model_metadata(self) -> dict[str, Any]:
        """Returns what GET /v2/models/NAME says. A dimension of -1 has any size."""
        return {
            "name": self.name,
            "versions": [self._engine.version],
            "platform": "torchrec",
            "inputs": self._engine.inputs.tensors(),
            "outputs": [
                {"name": name, "datatype": "FP32", "shape": [-1, *shape]}
                for name, shape in self._outputs.items()
            ],
        }

    def report(self) -> Report:
        """Returns what this worker has done."""
        observer = self._observer
        return Report(observer.tally.told(), observer.exposition().decode(), observer.freshness)

    async def metrics(self) -> bytes:
        """Returns the metrics of all workers in Prometheus's text format."""
        return metrics_of(await self._reports())

    def openapi(self) -> dict[str, Any]:
        """Returns the description of the HTTP interface."""
        return openapi(self.name, self._engine.inputs, self._outputs, self._engine.contract)

    async def page(self) -> str:
        """Returns the page that shows how the service does."""
        reports = await self._reports()
        fresh = [each.freshness for each in reports.values() if each.freshness is not None]
        return page(
            self.name,
            self._state(),
            together(each.tally for each in reports.values()),
            self._status(),
            self.why_not_ready(),
            self._engine.contract.deadline_ms,
            time.time() - self._began,
            max(fresh, default=None),
        )

    async def _reports(self) -> dict[str, Report]:
        others = self._places.workers()
        others.pop(self._worker, None)
        found = await reports(others)
        found[self._worker] = self.report()
        return dict(sorted(found.items()))

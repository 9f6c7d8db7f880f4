"""A model that is warmed up."""

import logging
from dataclasses import dataclass

import numpy as np
from torch import nn

from torchrec_bls.direct.offers.attach import attach
from torchrec_bls.direct.serving.publishing import serving_state
from torchrec_bls.direct.serving.served_model import ServedModel
from torchrec_bls.direct.serving.serving_state import ServingState, Standing
from torchrec_bls.errors import named
from torchrec_bls.serve.compiled import compile_if_faster
from torchrec_bls.serve.fused import fuse_if_faster
from torchrec_bls.serve.inputs import Features, ModelInputs, features_in
from torchrec_bls.serve.model_calls import Measured, ModelCalls, made_up, measured
from torchrec_bls.serve.predictor import Predictor
from torchrec_bls.serve.processes.plan import Plan

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Served:
    """A model that is warmed up.

    Attributes:
        calls: calls of the model, which has attached to its tables.
        inputs: what it takes.
        predictor: predictor of its batches.
        sample: a request that is made up.
        outputs: shape of each of its outputs by name, without the samples.
    """

    calls: ModelCalls
    inputs: ModelInputs
    predictor: Predictor
    sample: Features
    outputs: dict[str, tuple[int, ...]]

    def state(self) -> ServingState:
        """Returns what this process serves."""
        return serving_state(self.calls.model)

    def standing(self) -> Standing:
        """Returns where this process stands with the versions of the tables."""
        return ServedModel.of(self.calls.model).standing()

    def take_newest(self) -> None:
        """Changes to the newest version, in a process that answers nobody."""
        standing = self.standing()
        if standing.is_behind and not standing.drained_for:
            self.calls.answered([self.sample])


def built(plan: Plan) -> nn.Module:
    """Returns the model of a plan, which reads no tables yet.

    Raises:
        RuntimeError: it can't be built.
    """
    try:
        return plan.build().eval()
    except Exception as error:
        _log.exception("%s raised", plan.place)
        raise RuntimeError(
            f"the model can't be built: {plan.place} raised {named(error)}"
        ) from error


def warmed_up(plan: Plan, model: nn.Module) -> Served:
    """Attaches a model to its tables, compiles it where that is faster, and learns what its batches
    take.

    Raises:
        ValueError: the model can't be served.
        RendezvousError: nobody has the tables.
    """
    features, is_weighted = features_in(model)
    attach(model, plan.tables)
    calls = ModelCalls(model, [each.name for each in features], plan.dense_features)
    inputs = ModelInputs(features, calls.dense_columns, is_weighted, plan.contract.max_samples)
    predictor = Predictor(_times(plan, calls, inputs))
    _log.info(
        "a batch takes %.2f ms, %.1f us more for each sample and %.2f us for each id",
        predictor.costs.batch * 1e3,
        predictor.costs.sample * 1e6,
        predictor.costs.id * 1e6,
    )
    rows = [each.rows for each in inputs.features]
    sample = made_up(1, 1, np.array(rows), inputs.dense_columns, inputs.is_weighted)
    outputs = {name: each.shape[1:] for name, each in calls.answered([sample]).items()}
    return Served(calls, inputs, predictor, sample, outputs)


def _times(plan: Plan, calls: ModelCalls, inputs: ModelInputs) -> Measured:
    def measure() -> Measured:
        return list(measured(calls, inputs))

    if not plan.compile:
        return measure()
    fused = fuse_if_faster(calls.model, measure)
    times, compiled = compile_if_faster(calls.model, measure, plan.checkpoint)
    for text in filter(None, (fused, compiled)):
        _log.info("%s", text)
    return times

"""Plans by hand, of a small model."""

import dataclasses
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torchrec_bls.sharding import load_profile
from torchrec_bls.sharding.costs.profile import Profile

from torchrec_bls.overlap.bucket_plan import OverlapPlan
from torchrec_bls.overlap.measured.dense_layers import DenseLayer
from torchrec_bls.overlap.measured.trial import Trial
from torchrec_bls.overlap.modes.contention import ModeTimes
from torchrec_bls.overlap.modes.mode import Mode, with_modes
from torchrec_bls.overlap.plan_file import PlanOrigin
from torchrec_bls.overlap.search.timeline import Group

# So slow that much is to be gained.
FLOAT32 = Mode("float32", ModeTimes(100.0, 3e-2, 3e-2, 1.0))
UINT8 = Mode("uint8", ModeTimes(200.0, 2e-3, 2e-3, 1.0), changes_values=True)
WIDTH = 64


def make_model() -> nn.Module:
    """Four linear layers; gradients are ready from the last to the first, biases first."""
    torch.manual_seed(0)
    layers = [each for _ in range(3) for each in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def profile_with(*modes: Mode, backend: str = "gloo", ranks: int = 2) -> Profile:
    """The shipped profile with modes of its own."""
    return with_modes(load_profile("epyc-milan-2-cores"), {(backend, ranks): modes})


def layers_of(model: nn.Module, compute_us: float = 1000.0) -> tuple[DenseLayer, ...]:
    """One layer for each linear one, in the order of their gradients."""
    sizes = {name: 4 * parameter.numel() for name, parameter in model.named_parameters()}
    modules = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    found = []
    for module in reversed(modules):
        names = f"{module}.bias", f"{module}.weight"
        found.append(DenseLayer(names, tuple(sizes[name] for name in names), (compute_us,) * 3))
    return tuple(found)


def plan_of(
    groups: tuple[Group, ...],
    *modes: Mode,
    model: nn.Module | None = None,
    backend: str = "gloo",
    ranks: int = 2,
) -> OverlapPlan:
    """A plan for `make_model` that replaces both defaults."""
    # Little beside what layers compute, so that all but the last all-reduce is hidden; by default
    # everything follows the backward.
    origin = PlanOrigin(torch.__version__, backend, ranks, "by hand, today")
    layers, modes = layers_of(model or make_model()), modes or (FLOAT32,)
    reduced_us = modes[0].times.alone_us(sum(layer.bytes for layer in layers))
    plan = OverlapPlan(origin, layers, (reduced_us,) * 3, modes, groups)
    return dataclasses.replace(plan, trial=trial_as_predicted(plan))


def trial_as_predicted(plan: OverlapPlan, turns: int = 3) -> Trial:
    """A trial in which everything takes as long as predicted."""
    predicted = plan.prediction
    backwards = predicted.planned, predicted.ddp_default, predicted.torchrec_default
    return Trial(*((each.timeline.finish,) * turns for each in backwards))


def trying_all_plans() -> Any:
    """Plans are tried whatever they are predicted to save."""
    return patch("torchrec_bls.overlap.bucket_plan._LEAST_PREDICTED", -9)

"""Models of a lookup's time that ours is compared with, each fitted to the same measurements."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.modules.embedding_configs import DataType
from torchrec_bls.sharding.cost_interface import LookupWork
from torchrec_bls.sharding.costs.fitting.least_squares import nonnegative_relative
from torchrec_bls.sharding.costs.fitting.lookups import LookupSamples
from torchrec_bls.sharding.costs.lookup.features import as_columns

Floats = npt.NDArray[np.float64]
#: Fits to the first samples and predicts the second, (ops,) microseconds.
Baseline = Callable[[LookupSamples, LookupSamples], Floats]

_DATA_TYPES = {4: DataType.FP32, 2: DataType.FP16}
_FOLDS, _EPOCHS, _LOOK_EVERY = 5, 600, 10
# Inputs end at so many standard deviations, and predictions at so much beyond what was fitted to:
# a perceptron of the logarithm is off by powers of ten where it has seen nothing.
_FARTHEST_INPUT, _FARTHEST_LOG = 4.0, 0.7


def baselines(direction: str, *, pooled: bool) -> dict[str, Baseline]:
    """All of them by name; TorchRec's estimator, which is asked about bags, only if `pooled`."""
    estimator = partial(_regression, terms_of=partial(_torchrec_terms, direction=direction))
    torchrec: dict[str, Baseline] = {
        "TorchRec's estimator, scale": partial(estimator, constant=False),
        "TorchRec's estimator, scale and constant": estimator,
    }
    return (torchrec if pooled else {}) | {
        "linear, no reuse": partial(_regression, terms_of=_linear_terms),
        "roofline, unique rows": partial(_regression, terms_of=_roofline_terms),
        "MLP, reuse factors (the paper's)": partial(_perceptron, reuse_factors=True),
        "MLP, unique rows": partial(_perceptron, reuse_factors=False),
    }


def _regression(
    fitted: LookupSamples, tested: LookupSamples, *, terms_of: Any, constant: bool = True
) -> Floats:
    """Terms of shards, (shards,) each, summed over their op and scaled, and a constant."""

    def terms(samples: LookupSamples) -> Floats:
        columns = [samples.sums(term) for term in terms_of(samples.works)]
        return np.stack([np.full(len(samples.measured_us), float(constant)), *columns], axis=1)

    return terms(tested) @ nonnegative_relative(terms(fitted), fitted.measured_us)


def _torchrec_terms(works: Sequence[LookupWork], direction: str) -> list[Floats]:
    """What `EmbeddingPerfEstimator` says of each table on a CPU topology."""
    of = {"forward": "fwd_compute", "backward": "bwd_compute"}[direction]
    return [np.asarray([getattr(_torchrec_perf(work), of) for work in works])]


@cache
def _torchrec_perf(work: LookupWork) -> Any:
    table = EmbeddingBagConfig(work.rows, work.dim, "t", _DATA_TYPES[work.weight_bytes], ["f"])
    module: Any = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
    sharder: Any = EmbeddingBagCollectionSharder()
    only = ParameterConstraints(["table_wise"], ["fused"], pooling_factors=[work.pooling])
    topology = Topology(world_size=1, compute_device="cpu")
    enumerator = EmbeddingEnumerator(topology, int(work.samples), {"t": only})
    (option,) = enumerator.enumerate(module, [sharder])
    return option.shards[0].perf


def _linear_terms(works: Sequence[LookupWork]) -> list[Floats]:
    """A linear model that knows nothing of reuse."""
    c = as_columns(works)
    lookups = c["samples"] * c["pooling"]
    per_bytes = lookups * (c["dim"] * c["weight_bytes"])
    return [np.ones_like(lookups), c["samples"], lookups, per_bytes, c["samples"] * c["dim"]]


def _roofline_terms(works: Sequence[LookupWork]) -> list[Floats]:
    """Bytes over bandwidths: rows read first from memory, rows read again from a cache."""
    c = as_columns(works)
    lookups = c["samples"] * c["pooling"]
    row_bytes = c["dim"] * c["weight_bytes"]
    again = np.maximum(lookups - c["unique_rows"], 0) * row_bytes
    return [lookups, c["unique_rows"] * row_bytes, again, c["samples"] * c["dim"] * 4]


def _perceptron(fitted: LookupSamples, tested: LookupSamples, *, reuse_factors: bool) -> Floats:
    """The paper's MLP (sec. IV-C): a perceptron for each table, summed, and one for the sum.

    Rows, dim, pooling, samples and precision of a table, with its reuse factors or else its number
    of unique rows. Fitted to the logarithm of the time. Five of them, each stopped early by
    another fifth of what they are fitted to; the prediction is their geometric mean.
    """
    shuffled = np.random.default_rng(0).permutation(len(fitted.measured_us))
    predicted = []
    for fold in range(_FOLDS):
        watched = np.sort(shuffled[fold::_FOLDS])
        parts = fitted.take(np.setdiff1d(shuffled, watched)), fitted.take(watched), tested
        torch.manual_seed(fold)
        predicted.append(_trained(*parts, reuse_factors))
    seen = np.log(fitted.measured_us)
    low, high = seen.min() - _FARTHEST_LOG, seen.max() + _FARTHEST_LOG
    return np.exp(np.clip(np.mean(predicted, axis=0), low, high))


def _trained(
    trained: LookupSamples, watched: LookupSamples, tested: LookupSamples, reuse_factors: bool
) -> Floats:
    """The logarithm of the tested ops' times, (ops,), where the watched ones' error was least."""
    raw = _columns(trained, reuse_factors)
    mean, deviation = raw.mean(0), raw.std(0) + 1e-6
    target, goal = (torch.tensor(np.log(s.measured_us)).float() for s in (trained, watched))
    middle, spread = target.mean(), target.std()
    of_table = nn.Sequential(nn.Linear(raw.shape[1], 128), nn.ReLU(), nn.Linear(128, 32))
    of_sum = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def inputs(samples: LookupSamples) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scaled = (_columns(samples, reuse_factors) - mean) / deviation
        limited = torch.tensor(scaled.clip(-_FARTHEST_INPUT, _FARTHEST_INPUT)).float()
        return limited, torch.tensor(samples.op_of), torch.zeros(len(samples.measured_us), 32)

    def output(tables: torch.Tensor, op_of: torch.Tensor, nothing: torch.Tensor) -> torch.Tensor:
        summed = nothing.index_add(0, op_of, of_table(tables))
        return of_sum(summed).squeeze(1) * spread + middle

    given, unseen, asked = map(inputs, (trained, watched, tested))
    parameters = [*of_table.parameters(), *of_sum.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _EPOCHS)
    looks = []
    for epoch in range(1, _EPOCHS + 1):
        optimizer.zero_grad()
        nn.functional.smooth_l1_loss(output(*given), target, beta=0.1).backward()
        optimizer.step()
        schedule.step()
        if epoch % _LOOK_EVERY == 0:
            with torch.no_grad():
                error = float((output(*unseen) - goal).abs().mean())
                looks.append((error, output(*asked).double().numpy()))
    return min(looks, key=itemgetter(0))[1]


def _columns(samples: LookupSamples, reuse_factors: bool) -> Floats:
    """What a perceptron sees of each table, (tables, columns)."""
    c = as_columns(samples.works)
    names = ("rows", "dim", "samples", "pooling")
    logs = [np.log2(np.maximum(c[name], 2.0**-6)) for name in names]
    reuse = samples.reuse_factors.T if reuse_factors else [np.log2(c["unique_rows"] + 1)]
    return np.stack([*logs, c["weight_bytes"], *reuse], axis=1)

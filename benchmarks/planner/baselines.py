"""Models of a lookup's time that ours is compared with, each fitted to the same measurements."""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec_bls.sharding.cost_interface import LookupWork
from torchrec_bls.sharding.costs.fitting.least_squares import nonnegative_relative
from torchrec_bls.sharding.costs.fitting.lookups import LookupSamples
from torchrec_bls.sharding.costs.lookup.features import as_columns

Floats = npt.NDArray[np.float64]

#: Fits to the first samples and predicts the second, (ops,) microseconds.
Baseline = Callable[[LookupSamples, LookupSamples], Floats]

_DATA_TYPES = {4: DataType.FP32, 2: DataType.FP16}
_FOLDS = 5
_EPOCHS, _LOOK_EVERY = 600, 10
_LEARNING_RATE, _WEIGHT_DECAY = 1e-2, 0.1
# Inputs end at so many standard deviations, and predictions at so much beyond what was fitted to:
# a perceptron of the logarithm is off by powers of ten where it has seen nothing.
_FARTHEST_INPUT, _FARTHEST_LOG = 4.0, 0.7


def torchrec_ms(works: Sequence[LookupWork], direction: str) -> Floats:
    """What `EmbeddingPerfEstimator` says of each table on a CPU topology, (len(works),)."""
    return np.asarray([_torchrec_ms(work, direction) for work in works])


@functools.cache
def _torchrec_ms(work: LookupWork, direction: str) -> float:
    kind: Any = {"data_type": _DATA_TYPES[work.weight_bytes], "feature_names": ["f"]}
    table = EmbeddingBagConfig(name="t", embedding_dim=work.dim, num_embeddings=work.rows, **kind)
    only: Any = {"sharding_types": ["table_wise"], "compute_kernels": ["fused"]}
    constraints = {"t": ParameterConstraints(pooling_factors=[work.pooling], **only)}
    topology = Topology(world_size=1, compute_device="cpu")
    enumerator = EmbeddingEnumerator(topology, int(work.samples), constraints)
    (option,) = enumerator.enumerate(
        EmbeddingBagCollection(tables=[table], device=torch.device("meta")),
        [EmbeddingBagCollectionSharder()],  # type: ignore[list-item]
    )
    perf = option.shards[0].perf
    assert perf is not None
    return float(perf.fwd_compute if direction == "forward" else perf.bwd_compute)


def torchrec_estimator(direction: str, *, constant: bool) -> Baseline:
    """TorchRec's estimator with the best scale, and the best constant if asked."""

    def predict(fitted: LookupSamples, tested: LookupSamples) -> Floats:
        def terms(samples: LookupSamples) -> Floats:
            of_ops = samples.sums(torchrec_ms(samples.works, direction))
            return np.stack([of_ops, np.full(len(of_ops), float(constant))], axis=1)

        return terms(tested) @ nonnegative_relative(terms(fitted), fitted.measured_us)

    return predict


def linear(fitted: LookupSamples, tested: LookupSamples) -> Floats:
    """A linear model that knows nothing of reuse."""
    return _fitted(fitted, tested, _linear_terms)


def roofline(fitted: LookupSamples, tested: LookupSamples) -> Floats:
    """Bytes over bandwidths: rows read first from memory, rows read again from a cache."""
    return _fitted(fitted, tested, _roofline_terms)


def perceptron(*, reuse_factors: bool) -> Baseline:
    """The paper's MLP (sec. IV-C): a perceptron for each table, summed, and one for the sum.

    Rows, dim, pooling, samples and precision of a table, with its reuse factors or else its number
    of unique rows. Fitted to the logarithm of the time. Five of them, each stopped early by
    another fifth of what they are fitted to; the prediction is their geometric mean.
    """

    def predict(fitted: LookupSamples, tested: LookupSamples) -> Floats:
        shuffled = np.random.default_rng(0).permutation(len(fitted.measured_us))
        predicted = []
        for fold in range(_FOLDS):
            watched = np.sort(shuffled[fold::_FOLDS])
            trained = np.setdiff1d(shuffled, watched)
            torch.manual_seed(fold)
            model = _train(fitted.take(trained), fitted.take(watched), reuse_factors)
            predicted.append(model(tested))
        seen = np.log(fitted.measured_us)
        low, high = seen.min() - _FARTHEST_LOG, seen.max() + _FARTHEST_LOG
        return np.exp(np.clip(np.mean(predicted, axis=0), low, high))

    return predict


def _fitted(
    fitted: LookupSamples,
    tested: LookupSamples,
    of_shards: Callable[[dict[str, Floats]], list[Floats]],
) -> Floats:
    def terms(samples: LookupSamples) -> Floats:
        columns = [samples.sums(term) for term in of_shards(as_columns(samples.works))]
        return np.stack([np.ones(len(samples.measured_us)), *columns], axis=1)

    return terms(tested) @ nonnegative_relative(terms(fitted), fitted.measured_us)


def _linear_terms(c: dict[str, Floats]) -> list[Floats]:
    lookups = c["samples"] * c["pooling"]
    row_bytes = c["dim"] * c["weight_bytes"]
    once, per_bytes = np.ones_like(lookups), lookups * row_bytes
    return [once, c["samples"], lookups, per_bytes, c["samples"] * c["dim"]]


def _roofline_terms(c: dict[str, Floats]) -> list[Floats]:
    lookups = c["samples"] * c["pooling"]
    row_bytes = c["dim"] * c["weight_bytes"]
    again = np.maximum(lookups - c["unique_rows"], 0) * row_bytes
    return [lookups, c["unique_rows"] * row_bytes, again, c["samples"] * c["dim"] * 4]


class _Perceptron(nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.table = nn.Sequential(nn.Linear(columns, 128), nn.ReLU(), nn.Linear(128, 32))
        self.head = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, tables: torch.Tensor, op_of: torch.Tensor, ops: int) -> torch.Tensor:
        seen = self.table(tables)
        summed = seen.new_zeros(ops, seen.shape[1]).index_add(0, op_of, seen)
        output: torch.Tensor = self.head(summed).squeeze(1)
        return output


def _train(
    trained: LookupSamples, watched: LookupSamples, reuse_factors: bool
) -> Callable[[LookupSamples], Floats]:
    """Returns what predicts the logarithm of the time, (ops,)."""
    raw = _columns(trained, reuse_factors)
    mean, deviation = raw.mean(0), raw.std(0) + 1e-6
    target, goal = (
        torch.from_numpy(np.log(samples.measured_us)).float() for samples in (trained, watched)
    )
    middle, spread = target.mean(), target.std()
    model = _Perceptron(raw.shape[1])

    def inputs(samples: LookupSamples) -> tuple[torch.Tensor, torch.Tensor, int]:
        scaled = torch.from_numpy((_columns(samples, reuse_factors) - mean) / deviation).float()
        limited = scaled.clamp(-_FARTHEST_INPUT, _FARTHEST_INPUT)
        return limited, torch.from_numpy(samples.op_of), len(samples.measured_us)

    def output(given: tuple[torch.Tensor, torch.Tensor, int]) -> torch.Tensor:
        result: torch.Tensor = model(*given) * spread + middle
        return result

    given, unseen = inputs(trained), inputs(watched)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, _EPOCHS)
    best, best_state = float("inf"), copy.deepcopy(model.state_dict())
    for epoch in range(1, _EPOCHS + 1):
        optimizer.zero_grad()
        nn.functional.smooth_l1_loss(output(given), target, beta=0.1).backward()
        optimizer.step()
        schedule.step()
        if epoch % _LOOK_EVERY == 0:
            with torch.no_grad():
                error = float((output(unseen) - goal).abs().mean())
            if error < best:
                best, best_state = error, copy.deepcopy(model.state_dict())
    model.load_state_dict(best_state)

    def predict(samples: LookupSamples) -> Floats:
        with torch.no_grad():
            return output(inputs(samples)).double().numpy()

    return predict


def _columns(samples: LookupSamples, reuse_factors: bool) -> Floats:
    c = as_columns(samples.works)
    names = ("rows", "dim", "samples", "pooling")
    logs = [np.log2(np.maximum(c[name], 2.0**-6)) for name in names]
    columns = [*logs, c["weight_bytes"]]
    if reuse_factors:
        return np.concatenate([np.stack(columns, axis=1), samples.reuse_factors], axis=1)
    return np.stack([*columns, np.log2(c["unique_rows"] + 1)], axis=1)

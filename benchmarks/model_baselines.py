"""Models of a lookup's time that ours is compared with, each fitted to the same measurements."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec_bls.sharding.estimates import LookupWork
from torchrec_bls.sharding.least_squares import nonnegative_relative
from torchrec_bls.sharding.lookup_features import as_columns
from torchrec_bls.sharding.lookup_fit import LookupSamples

Floats = npt.NDArray[np.float64]

#: Fits to the first samples and predicts the second, (ops,) microseconds.
Baseline = Callable[[LookupSamples, LookupSamples], Floats]

_DATA_TYPES = {4: DataType.FP32, 2: DataType.FP16}
#: Widths and learning rates that the perceptron chooses among, on a part of what it is fitted to.
_CHOICES = ((32, 3e-3), (64, 3e-3), (128, 1e-3))
_EPOCHS = 600
_PATIENCE = 80


def torchrec_us(works: list[LookupWork], direction: str) -> Floats:
    """What `EmbeddingPerfEstimator` says of each table on a CPU topology, in its own unit (ms)."""
    times = []
    for work in works:
        table = EmbeddingBagConfig(
            name="t",
            embedding_dim=work.dim,
            num_embeddings=work.rows,
            feature_names=["f"],
            data_type=_DATA_TYPES[work.weight_bytes],
        )
        model = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
        enumerator = EmbeddingEnumerator(
            topology=Topology(world_size=1, compute_device="cpu"),
            batch_size=int(work.samples),
            constraints={
                "t": ParameterConstraints(
                    sharding_types=["table_wise"],
                    compute_kernels=["fused"],
                    pooling_factors=[work.pooling],
                )
            },
        )
        (option,) = enumerator.enumerate(
            model,
            [EmbeddingBagCollectionSharder()],  # type: ignore[list-item]
        )
        perf = option.shards[0].perf
        assert perf is not None
        times.append(perf.fwd_compute if direction == "forward" else perf.bwd_compute)
    return np.asarray(times)


def torchrec_estimator(direction: str, *, constant: bool) -> Baseline:
    """TorchRec's estimator with the best scale, and the best constant if asked."""

    def predict(fitted: LookupSamples, tested: LookupSamples) -> Floats:
        def terms(samples: LookupSamples) -> Floats:
            of_ops = samples.sums(torchrec_us(list(samples.works), direction))
            return np.stack([of_ops, np.full(len(of_ops), float(constant))], axis=1)

        return terms(tested) @ nonnegative_relative(terms(fitted), fitted.measured_us)

    return predict


def linear(fitted: LookupSamples, tested: LookupSamples) -> Floats:
    """A linear model that knows nothing of reuse."""
    return _terms(tested, _linear_terms) @ nonnegative_relative(
        _terms(fitted, _linear_terms), fitted.measured_us
    )


def roofline(fitted: LookupSamples, tested: LookupSamples) -> Floats:
    """Bytes over bandwidths: rows read first from memory, rows read again from a cache."""
    return _terms(tested, _roofline_terms) @ nonnegative_relative(
        _terms(fitted, _roofline_terms), fitted.measured_us
    )


def perceptron(*, reuse_factors: bool) -> Baseline:
    """The paper's MLP (sec. IV-C): a perceptron for each table, summed, and one for the sum.

    Rows, dim, pooling, samples and precision of a table, with its reuse factors or else its number
    of unique rows. Fitted to the logarithm of the time. Width and learning rate are chosen, and
    training is stopped, on a fifth of what it is fitted to.
    """

    def predict(fitted: LookupSamples, tested: LookupSamples) -> Floats:
        ops = len(fitted.measured_us)
        shuffled = np.random.default_rng(0).permutation(ops)
        watched = fitted.take(np.sort(shuffled[: ops // 5]))
        trained = fitted.take(np.sort(shuffled[ops // 5 :]))
        models = [_train(trained, watched, *choice, reuse_factors) for choice in _CHOICES]
        _, best = min(models, key=lambda each: each[0])
        return np.exp(best(tested))

    return predict


def _terms(
    samples: LookupSamples, of_shards: Callable[[dict[str, Floats]], list[Floats]]
) -> Floats:
    columns = [samples.sums(term) for term in of_shards(as_columns(samples.works))]
    return np.stack([np.ones(len(samples.measured_us)), *columns], axis=1)


def _linear_terms(c: dict[str, Floats]) -> list[Floats]:
    lookups = c["samples"] * c["pooling"]
    row_bytes = c["dim"] * c["weight_bytes"]
    return [
        np.ones_like(lookups),
        c["samples"],
        lookups,
        lookups * row_bytes,
        c["samples"] * c["dim"],
    ]


def _roofline_terms(c: dict[str, Floats]) -> list[Floats]:
    lookups = c["samples"] * c["pooling"]
    row_bytes = c["dim"] * c["weight_bytes"]
    again = np.maximum(lookups - c["unique_rows"], 0) * row_bytes
    return [lookups, c["unique_rows"] * row_bytes, again, c["samples"] * c["dim"] * 4]


class _Perceptron(nn.Module):
    def __init__(self, columns: int, width: int) -> None:
        super().__init__()
        self.table = nn.Sequential(
            nn.Linear(columns, 2 * width), nn.ReLU(), nn.Linear(2 * width, width), nn.ReLU()
        )
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, tables: torch.Tensor, op_of: torch.Tensor, ops: int) -> torch.Tensor:
        seen = self.table(tables)
        summed = seen.new_zeros(ops, seen.shape[1]).index_add(0, op_of, seen)
        output: torch.Tensor = self.head(summed).squeeze(1)
        return output


def _train(
    trained: LookupSamples, watched: LookupSamples, width: int, rate: float, reuse_factors: bool
) -> tuple[float, Callable[[LookupSamples], Floats]]:
    torch.manual_seed(0)
    raw = _columns(trained, reuse_factors)
    mean, deviation = raw.mean(0), raw.std(0) + 1e-6
    target = torch.from_numpy(np.log(trained.measured_us)).float()
    middle, spread = target.mean(), target.std()

    def output(model: _Perceptron, samples: LookupSamples) -> torch.Tensor:
        tables = torch.from_numpy((_columns(samples, reuse_factors) - mean) / deviation).float()
        op_of = torch.from_numpy(samples.op_of)
        result: torch.Tensor = model(tables, op_of, len(samples.measured_us)) * spread + middle
        return result

    model = _Perceptron(raw.shape[1], width)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, weight_decay=1e-5)
    goal = torch.from_numpy(np.log(watched.measured_us)).float()
    best, best_state, since = float("inf"), model.state_dict(), 0
    for _ in range(_EPOCHS):
        optimizer.zero_grad()
        loss = nn.functional.smooth_l1_loss(output(model, trained), target, beta=0.1)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            error = float((output(model, watched) - goal).abs().mean())
        since += 1
        if error < best:
            best, since = error, 0
            best_state = {name: value.clone() for name, value in model.state_dict().items()}
        if since > _PATIENCE:
            break
    model.load_state_dict(best_state)

    def predict(samples: LookupSamples) -> Floats:
        with torch.no_grad():
            return output(model, samples).double().numpy()

    return best, predict


def _columns(samples: LookupSamples, reuse_factors: bool) -> Floats:
    c = as_columns(samples.works)
    names = ("rows", "dim", "samples", "pooling")
    logs = [np.log2(np.maximum(c[name], 2.0**-6)) for name in names]
    columns = [*logs, c["weight_bytes"]]
    if reuse_factors:
        return np.concatenate([np.stack(columns, axis=1), samples.reuse_factors], axis=1)
    return np.stack([*columns, np.log2(c["unique_rows"] + 1)], axis=1)

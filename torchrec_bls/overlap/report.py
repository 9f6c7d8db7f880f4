"""Plans for people: a text, and timelines for ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from torchrec_bls.overlap.hook import PlannedBucket
from torchrec_bls.overlap.interval import Interval
from torchrec_bls.overlap.measured.dense_layers import DenseLayer
from torchrec_bls.overlap.measured.trial import Trial
from torchrec_bls.overlap.plan_file import PlanOrigin
from torchrec_bls.overlap.prediction import Prediction
from torchrec_bls.rendering import document
from torchrec_bls.rendering.document import Table, Words
from torchrec_bls.rendering.trace import Event, Moment, process_name, slice_of, thread_name
from torchrec_bls.sharding.costs.contention import Mode
from torchrec_bls.sharding.overlap.timeline import Group, Timeline

_MIB = 2**20
_DEFAULTS = "DistributedDataParallel's default", "TorchRec's default"


def as_text(
    origin: PlanOrigin,
    layers: Sequence[DenseLayer],
    buckets: Sequence[PlannedBucket],
    planned: Timeline,
    prediction: Prediction,
    reduced_us: tuple[float, float],
    trial: Trial | None,
    gains: Sequence[tuple[Interval | None, bool]],
) -> str:
    """Returns the origin of a plan, its buckets and their times, and which defaults stay.

    `reduced_us` is the time of one all-reduce of all gradients behind a backward: by the profile,
    and as measured. `gains` are those over the defaults of DistributedDataParallel and TorchRec,
    None if not tried, each with whether the plan replaces the default.
    """
    parts = _head(origin, layers), _buckets(buckets, planned), _times(prediction, trial, reduced_us)
    return "\n\n".join("\n".join(part) for part in (*parts, _verdicts(prediction, gains))) + "\n"


def _head(origin: PlanOrigin, layers: Sequence[DenseLayer]) -> Iterator[str]:
    names = [name for layer in layers for name in layer.parameters]
    sizes = [own for layer in layers for own in layer.sizes]
    yield (
        f"dense gradients: {len(names)} parameters, {sum(sizes) / _MIB:.2f} MiB, {origin.ranks} "
        f"ranks over {origin.backend}, profile {origin.profile}"
    )
    largest = max(sizes)
    if 2 * largest > sum(sizes) and len(names) > 1:
        yield (
            f"'{names[sizes.index(largest)]}' has {100 * largest / sum(sizes):.0f} % of all bytes: "
            "a gradient is never cut, whatever the plan"
        )


def _buckets(buckets: Sequence[PlannedBucket], times: Timeline) -> Iterator[str]:
    moments = zip(buckets, times.begin, times.end, strict=True)
    rows = [
        [
            str(number),
            f"{bucket.bytes / _MIB:.3f}",
            f"{begin / 1e3:.2f}",
            f"{end / 1e3:.2f}",
            f"{bucket.mode}, {bucket.parameters[0]} to {bucket.parameters[-1]}",
        ]
        for number, (bucket, begin, end) in enumerate(moments)
    ]
    columns = ("bucket", "MiB", "begins ms", "ends ms", Words("travels as, parameters"))
    yield document.as_text([Table(columns, rows)])


def _times(
    prediction: Prediction, trial: Trial | None, reduced_us: tuple[float, float]
) -> Iterator[str]:
    by_profile_us, measured_us = reduced_us
    yield (
        f"one all-reduce behind the backward: measured {measured_us / 1e3:.2f} ms, by the profile "
        f"{by_profile_us / 1e3:.2f} ms"
    )
    yield "backward, ms: predicted (nine of ten draws between), and as tried"
    for name, interval, tried_us in (
        ("with this plan", prediction.planned, trial and trial.planned_us),
        (_DEFAULTS[0], prediction.ddp_default, trial and trial.ddp_default_us),
        (_DEFAULTS[1], prediction.torchrec_default, trial and trial.torchrec_default_us),
        ("without all-reduces", prediction.alone, None),
    ):
        ends = f"({interval.low:.2f} to {interval.high:.2f})"
        tried = f"{median(tried_us) / 1e3:8.2f}" if tried_us else ""
        yield f"  {name:<34} {interval.middle:8.2f}  {ends:<20} {tried}".rstrip()


def _verdicts(
    prediction: Prediction, gains: Sequence[tuple[Interval | None, bool]]
) -> Iterator[str]:
    predicted = prediction.gain_over_ddp, prediction.gain_over_torchrec
    for name, by_modes, (gain, replaces) in zip(_DEFAULTS, predicted, gains, strict=True):
        found = f"over {name}: {_percent(gain or by_modes)} {'saved' if gain else 'predicted'}"
        yield f"{found}; {'the plan replaces it' if replaces else 'nothing certain: it stays'}"


def _percent(gain: Interval) -> str:
    return f"{100 * gain.middle:.1f} % ({100 * gain.low:.1f} to {100 * gain.high:.1f})"


def trace_events(
    timelines: Mapping[str, tuple[Sequence[Group], Timeline]], modes: Sequence[Mode]
) -> Iterator[Event]:
    """Yields the events of a trace. Each timeline is a process, with backward and all-reduces."""
    for process, (name, (groups, times)) in enumerate(timelines.items()):
        yield process_name(process, name)
        for thread, named in enumerate(("backward", "all-reduces")):
            yield thread_name(process, thread, named)
        before = 0.0
        for number, ready in enumerate(times.ready):
            yield slice_of(f"layer {number}", Moment(process, 0, before), ready)
            before = ready
        for number, (group, begin, end) in enumerate(
            zip(groups, times.begin, times.end, strict=True)
        ):
            label = f"bucket {number}, {modes[group.mode].name}"
            yield slice_of(label, Moment(process, 1, begin), end)

"""Plans for people: a text, and timelines for ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from torchrec_bls.overlap.hook import PlannedBucket
from torchrec_bls.overlap.measured.dense_layers import DenseLayer
from torchrec_bls.overlap.measured.trial import Trial
from torchrec_bls.overlap.modes.mode import Mode
from torchrec_bls.overlap.plan_file import PlanOrigin
from torchrec_bls.overlap.prediction import Prediction
from torchrec_bls.overlap.search.timeline import Timeline
from torchrec_bls.rendering import document
from torchrec_bls.rendering.document import Table, Words
from torchrec_bls.rendering.trace import Event, Moment, process_name, slice_of, thread_name

_MIB = 2**20
_DEFAULTS = "DistributedDataParallel's default", "TorchRec's default"


def as_text(
    origin: PlanOrigin,
    layers: Sequence[DenseLayer],
    buckets: Sequence[PlannedBucket],
    prediction: Prediction,
    reduced_us: tuple[float, float],
    trial: Trial | None,
    replaces: tuple[bool, bool],
) -> str:
    """Returns the origin of a plan, its buckets and their times, and which defaults stay.

    `reduced_us` is the time of one all-reduce of all gradients behind a backward: by the profile,
    and as measured. `replaces` says whether the plan replaces the defaults of
    DistributedDataParallel and of TorchRec.
    """
    parts = (
        _head(origin, layers),
        _buckets(buckets, prediction.planned.timeline),
        _times(prediction, trial, reduced_us),
        _verdicts(prediction, trial, replaces),
    )
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


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
    yield f"{'backward, ms':<36} predicted    tried"
    for name, predicted_us, tried_us in (
        ("with this plan", prediction.planned.timeline.finish, trial and trial.planned_us),
        (_DEFAULTS[0], prediction.ddp_default.timeline.finish, trial and trial.ddp_default_us),
        (
            _DEFAULTS[1],
            prediction.torchrec_default.timeline.finish,
            trial and trial.torchrec_default_us,
        ),
        ("without all-reduces", prediction.alone_us, None),
    ):
        tried = f"{median(tried_us) / 1e3:8.2f}" if tried_us else ""
        yield f"  {name:<34} {predicted_us / 1e3:9.2f} {tried}".rstrip()


def _verdicts(
    prediction: Prediction, trial: Trial | None, replaces: tuple[bool, bool]
) -> Iterator[str]:
    predicted = prediction.gain_over_ddp, prediction.gain_over_torchrec
    tried = (trial.gain_over_ddp, trial.gain_over_torchrec) if trial else (None, None)
    for name, gain, found, is_sure in zip(_DEFAULTS, predicted, tried, replaces, strict=True):
        verdict = "the plan replaces it" if is_sure else "it stays, since no gain is certain"
        change = f"{_change(gain)} by prediction"
        if found is not None:
            change = f"{_change(found.mean)}, at worst {_change(found.least)}"
        yield f"backward against {name}: {change}; {verdict}"


def _change(gain: float) -> str:
    percent = round(100 * gain, 1)
    return f"{abs(percent):.1f} % {'longer' if percent < 0 else 'shorter'}"


def trace_events(prediction: Prediction, modes: Sequence[Mode]) -> Iterator[Event]:
    """Yields the events of a trace. Each backward is a process, with computing and all-reduces."""
    backwards = {
        "plan": prediction.planned,
        _DEFAULTS[0]: prediction.ddp_default,
        _DEFAULTS[1]: prediction.torchrec_default,
    }
    for process, (name, backward) in enumerate(backwards.items()):
        groups, times = backward.groups, backward.timeline
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

"""Records steps of any job, for `torchrec-bls trace` and `torchrec-bls simulate --trace`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile, record_function

from torchrec_bls.observe.traces.kineto import METADATA, METADATA_FORMAT, execution_trace_of

_is_recording = False


@contextmanager
def record_step(folder: str | os.PathLike[str]) -> Iterator[Callable[[], None]]:
    """Records the steps of this rank, of training or inference, over gloo or bounded-lag channels.

        with record_step("traces") as end_of_step:
            for batch in batches:
                train(batch)
                end_of_step()

    All ranks record the same steps. Each writes two files, which exist when the block ends:
    `rank0.json`, the trace of torch.profiler, and `execution_trace_rank0.json`, PyTorch's execution
    trace. Older files with these names are removed when the block begins. A block that raises
    writes nothing.

    The sequence numbers and process groups of gloo's collectives come from torch's flight recorder.
    It holds the last 2000 of a rank (TORCH_FR_BUFFER_SIZE). If a block has more, and there are
    several process groups, the traces can't be joined.

    Args:
        folder: one folder for all ranks; it must exist.

    Yields:
        A function to call after each step.

    Raises:
        ValueError: the folder does not exist or can't be written to, or no step was ended.
        RuntimeError: this process records already, here or by another ExecutionTraceObserver.
    """
    global _is_recording
    if _is_recording:
        raise RuntimeError("this process records steps already: end that record_step first")
    rank = dist.get_rank() if dist.is_initialized() else 0
    kineto = Path(folder) / f"rank{rank}.json"
    execution = execution_trace_of(kineto)
    _check_writable(kineto, execution)
    _is_recording = True
    try:
        with _removed_if_raised(kineto, execution):
            yield from _record(kineto, execution)
    finally:
        _is_recording = False


def _record(kineto: Path, execution: Path) -> Iterator[Callable[[], None]]:
    observer = ExecutionTraceObserver()
    observer.register_callback(str(execution))
    try:
        if not execution.exists():
            raise RuntimeError(
                "an ExecutionTraceObserver is registered in this process already: unregister it"
            )
        steps = _Steps()
        before = _flight_records()
        with profile(activities=[ProfilerActivity.CPU], execution_trace_observer=observer) as both:
            steps.begin()
            try:
                yield steps.end_of_step
            finally:
                steps.end()
            if steps.done == 0:
                raise ValueError(
                    "no step was recorded: call what record_step gives after each step"
                )
            both.add_metadata_json(METADATA, json.dumps(_metadata(steps.done, before)))
    finally:
        observer.unregister_callback()
    both.export_chrome_trace(str(kineto))


class _Steps:
    """Ranges of steps, with the names of torch.profiler's schedules."""

    def __init__(self) -> None:
        self.done = 0
        self._range: Any = None

    def begin(self) -> None:
        self._range = record_function(f"ProfilerStep#{self.done}")
        self._range.__enter__()

    def end_of_step(self) -> None:
        self.end()
        self.done += 1
        self.begin()

    def end(self) -> None:
        self._range.__exit__(None, None, None)


def _metadata(steps: int, before: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Returns facts that Kineto does not record: whole steps, and the collectives of this rank."""
    now = _flight_records()
    collectives = None
    if before is not None and now is not None:
        first = before[-1]["record_id"] + 1 if before else 0
        new = [each for each in now if each["record_id"] >= first]
        if new and new[0]["record_id"] == first:  # no entry was overwritten
            collectives = [
                {
                    "name": each["profiling_name"],
                    "group": each["process_group"][0],
                    "sequence": each["collective_seq_id"],
                    "input_sizes": each["input_sizes"],
                    "output_sizes": each["output_sizes"],
                    "input_dtypes": each.get("input_dtypes"),
                }
                for each in new
            ]
    return {"format": METADATA_FORMAT, "steps": steps, "collectives": collectives}


def _flight_records() -> list[dict[str, Any]] | None:
    """Returns the entries of the flight recorder; None if this torch has no recorder."""
    dump = getattr(_distributed_c10d, "_dump_fr_trace_json", None)
    return None if dump is None else json.loads(dump()).get("entries", [])


def _check_writable(*paths: Path) -> None:
    folder = paths[0].parent
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: make it before all ranks record")
    for path in paths:
        try:
            path.write_text("")
            path.unlink()
        except OSError as error:
            raise ValueError(f"can't write {path}: {error}") from error


@contextmanager
def _removed_if_raised(*paths: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for path in paths:
            path.unlink(missing_ok=True)
        raise

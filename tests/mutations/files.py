"""Good files of each kind, and what their readers do with them."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torchrec_bls.sharding.calibration.configurations import (
    LookupConfiguration,
    TableConfiguration,
)
from torchrec_bls.sharding.calibration.fit import collectives_of, lookups_of
from torchrec_bls.sharding.calibration.messages import Message
from torchrec_bls.sharding.calibration.records import Records, read_records
from torchrec_bls.sharding.calibration.step_models import Collection, StepModel
from torchrec_bls.sharding.costs.fitting.lookups import samples_of
from torchrec_bls.sharding.costs.machine import Machine
from torchrec_bls.sharding.costs.profile import load_profile
from torchrec_bls.sharding.problem.model_file import read_model
from torchrec_bls.sharding.problem.plan_file import read_plan, save_plan
from torchrec_bls.sharding.problem.tables import PlacedShard, PlacedTable, Table

from tests.analysis import sampled
from tests.checkpoints.files import write_distributed, write_safetensors, write_torch_file
from tests.observe.traces.gloo_jobs import GlooJob
from tests.overlap import plans
from tests.sharding.synthetic import small_profile
from torchrec_bls import CodecConfig
from torchrec_bls.analysis.samples import Samples
from torchrec_bls.checkpoints import Delta, Head, TablePart, open_checkpoint, write_part
from torchrec_bls.cli.main import run
from torchrec_bls.direct.keeping.tables_file import read_tables_file
from torchrec_bls.direct.layout import Shard, TableLayout, digest_of
from torchrec_bls.direct.offers.manifest import Manifest, OfferedModule, OfferedTable
from torchrec_bls.direct.part_index import Facts, IndexRecord, PieceRecord
from torchrec_bls.errors import ProtocolError
from torchrec_bls.observe.traces.execution_trace import read_execution_trace
from torchrec_bls.overlap.bucket_plan import load_plan
from torchrec_bls.overlap.modes.mode import overlap_of, with_modes
from torchrec_bls.records import decode, read_bytes

#: Errors that readers promise; each has a reason.
REFUSALS = (ValueError, OSError, ProtocolError)


class Kind(NamedTuple):
    """A kind of file.

    Attributes:
        write: writes a good file into a folder and returns its path.
        read: reads such a file.
    """

    write: Callable[[Path], Path]
    read: Callable[[Path], object]


def _profile(folder: Path) -> Path:
    modes = plans.FLOAT32, plans.UINT8
    with_modes(small_profile(), {("gloo", 2): modes}).save(folder / "profile.json")
    return folder / "profile.json"


def write_measurements(folder: Path) -> Path:
    """Writes a calibration with a measurement of each kind, and two visits. Returns the path."""
    path = folder / "profile.measurements.jsonl"
    path.unlink(missing_ok=True)
    records = Records(path, {"seed": 1}, Machine("cpu", "a processor", 2, 2**30))
    records.add(
        "memory", 1.0, {"buffer_bytes": [64, 128], "bytes_per_us": [9, 8], "row_us": [1, 2]}
    )
    random = np.random.default_rng(0)
    configuration = LookupConfiguration(
        (TableConfiguration(100, 4, 1.5, 0.0), TableConfiguration(9, 8, 2.0, 1.1)), 32, 4, True, 7
    )
    description = {"lookups": [48, 64], "unique_rows": [40, 9], "reuse_factors": [[1.0], [0, 1.0]]}
    described = {"index": 3, "configuration": configuration.as_json(), **description}
    records.add("workload", 0.0, described)
    for kind in ("lookup", "retest"):
        times = {f"{d}_us": random.uniform(1, 2, 3).tolist() for d in ("forward", "backward")}
        records.add(kind, 0.1, {"visit": 0, "index": 3, **times})
    for visit in (0, 2):
        messages = [
            {**each.as_json(), "backend": "gloo", "world_size": 2, "us": [5.5], "cpu_us": [3]}
            for each in (
                Message("all_to_all", "uneven", ((64, 128), (0, 64))),
                Message("all_reduce", "grid", ((256,),)),
            )
        ]
        entry = {"backend": "gloo", "world_size": 2, "visit": visit, "messages": messages}
        records.add("collectives", 0.1, entry)
    model = StepModel("m", (Collection(True, configuration.tables),), 64, 5)
    us = {"table_wise": [900.0], "mixed": [800.0]}
    entry = {"world_size": 2, "index": 0, "model": model.as_json(), "backend": "bls"}
    records.add("steps", 0.1, {**entry, "training": True, "us": us})
    return path


def _read_measurements(path: Path) -> None:
    _, entries = read_records(path)
    for visits in (lookups_of(entries), lookups_of(entries, "retest")):
        for direction in ("forward", "by_exchange"):
            samples_of([*visits.values()], direction, True, "tenth percentile")
    collectives_of(entries)
    for entry in entries:
        if entry["kind"] == "workload":
            LookupConfiguration.from_json(entry["configuration"])
        elif entry["kind"] == "steps":
            model = StepModel.from_json(entry["model"])
            assert model.batch > 0


def _plan(folder: Path) -> Path:
    halves = tuple(PlacedShard(rank, 5, 8, 5 * rank) for rank in range(2))
    tables = (
        PlacedTable(Table("t", 10, 8, "ebc"), "table_row_wise", halves),
        PlacedTable(Table("u", 10, 8, "ebc"), "table_wise", (PlacedShard(3, 10, 8),)),
    )
    save_plan(folder / "plan.json", tables, 4, 2)
    return folder / "plan.json"


def _read_plan(path: Path) -> None:
    saved = read_plan(path)
    saved.check_shape(4, 2, str(path))
    saved.of([Table("t", 10, 8, "ebc"), Table("u", 10, 8, "ebc")], str(path))


def _overlap_plan(folder: Path) -> Path:
    groups = plans.Group(2, 0, 1), plans.Group(2, 1)
    plans.plan_of(groups, plans.FLOAT32, plans.UINT8).save(folder / "overlap.json")
    return folder / "overlap.json"


def _read_overlap_plan(path: Path) -> None:
    profile = dataclasses.replace(small_profile(), name="by hand", measured_at="today")
    load_plan(path, profile).report()


def _model(folder: Path) -> Path:
    tables = [
        {"name": "t", "rows": 1000, "dim": 64, "pooling_factor": 2.5, "unique_rows": {"64": 140}},
        {"name": "u", "rows": 9, "dim": 8, "pooling_factor": 1, "sharding_types": ["row_wise"]},
    ]
    path = folder / "model.json"
    path.write_text(json.dumps({"tables": tables}))
    return path


def _bounds(folder: Path) -> Path:
    measured = {"unique": {"ratio": 2.5, "encode": 4e9, "decode": 6e9}}
    content = {
        "version": 1,
        "decay": {"start": 2.0, "iterations": 5000},
        "backward": "fp32",
        "link": 1.25e8,
        "ranks_per_core": 2,
        "tables": {
            "t": {"bound": 0.01},
            "u": {"codec": "fp16"},
            "v": {"bound": 0.03, "stages": "auto", "measured": measured},
        },
    }
    path = folder / "bounds.json"
    path.write_text(json.dumps(content))
    return path


def _samples(folder: Path) -> Path:
    lookup = sampled.lookup(sampled.random_weights(), [[1], [2, 3]])
    tables = [sampled.table("a"), sampled.table("b", features=("f", "g"))]
    sampled.written(folder / "samples", tables, [[[lookup] * len(t.features) for t in tables]])
    return folder / "samples" / "samples.json"


def _batch(folder: Path) -> Path:
    return _samples(folder).with_name("batch-00000.npz")


def _read_samples(path: Path) -> None:
    samples = Samples(path.parent)
    for table in samples.tables:
        samples.of(table)


def _manifest(folder: Path) -> Path:
    layout = TableLayout("t", 10, 8, "FP32", (Shard(0, 0, 5, 0, 8), Shard(1, 5, 5, 0, 8)))
    tables = [OfferedTable(layout, [4096, 4096], ["f"], "SUM")]
    form = {"names": ["f"], "kernel_means": [], "division": None}
    module = OfferedModule(
        *("bags", False, True, False, "raise", form, tables, [8192, 8192], [1, 1]),
        *("torch.float32", True, digest_of([layout]).hex()),
    )
    rows = TableLayout("u", 10, 8, "INT8", layout.shards)
    output = {"output": "torch.float32", "row_alignment": 16, "with_ids": False}
    stored = OfferedModule(
        *("rows", True, True, False, "refuse", output, [OfferedTable(rows, [], ["f"], "SUM")]),
        *([8192, 8192], [2, 1], "torch.uint8", True, "00" * 32),
    )
    path = folder / "manifest.json"
    modules = [module, stored]
    path.write_text(json.dumps(Manifest("host", "step 3", 3, modules).as_json()))
    return path


def _tables_file(folder: Path) -> Path:
    layout = TableLayout("t", 10, 8, "FP32", (Shard(0, 0, 10, 0, 8),))
    module = OfferedModule(
        name="bags",
        quantized=False,
        pooled=True,
        weighted=False,
        bad_ids="refuse",
        form={"names": ["f"], "kernel_means": [], "division": None},
        tables=[OfferedTable(layout, [0], ["f"], "SUM")],
        sizes=[320],
        pieces=[1],
        dtype="torch.float32",
        huge_pages=False,
        digest=digest_of([layout]).hex(),
    )
    path = folder / "keeper.tables"
    content = {
        "manifest": Manifest("host", "step 3", 3, [module]).as_json(),
        "pages": [[1, 2, 3, 4, 4096]],
        "versions": [
            {"serial": 3, "version": "step 3", "indexes": [[1, 2, 3, 5, 8192]]},
            {"serial": 2, "version": "step 2", "indexes": [[1, 2, 4, 5, 8192]]},
        ],
    }
    path.write_text(json.dumps(content))
    return path


def _read_manifest(path: Path) -> None:
    where = str(path)
    content = decode(read_bytes(path), object, where, "install one version", ProtocolError)
    assert Manifest.from_json(content, where).descriptors > 0


def _index(folder: Path) -> Path:
    address = (1, 2, 3, 4, 8192)
    pieces = [PieceRecord(address, "step 2", "0a" * 64), PieceRecord(address, "step 3", "")]
    path = folder / "index.json"
    facts = Facts(1.7e9, 0.5, 4096, 4096, 1.6e9)
    path.write_bytes(msgspec.json.encode(IndexRecord(pieces, facts)))
    return path


def _read_index(path: Path) -> None:
    decode(read_bytes(path), IndexRecord, str(path), "install one version", ProtocolError)


def _tensors() -> dict[str, torch.Tensor]:
    return {"t": torch.ones(3, 2), "u": torch.ones(2, dtype=torch.float16), "s": torch.tensor(1)}


def _torch_file(folder: Path) -> Path:
    return write_torch_file(folder, _tensors())


def _safetensors(folder: Path) -> Path:
    return write_safetensors(folder, _tensors())


def _metadata(folder: Path) -> Path:
    return write_distributed(folder, _tensors()) / ".metadata"


def _blocks(folder: Path) -> Path:
    return write_distributed(folder, _tensors()) / "__0_0.distcp"


def _read_checkpoint(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        for rows in checkpoint.values():
            rows.whole()


def _delta(folder: Path) -> Path:
    path = folder / "rank-0-of-1.safetensors"
    path.unlink(missing_ok=True)
    part = TablePart(torch.tensor([1, 3]), {0: torch.ones(2, 3), 3: torch.ones(2, 5)})
    write_part(folder, Head("step-2@1", "step-1", 0, 1, 1.7e9), {"t": part}, _tensors())
    return path


def _read_delta(path: Path) -> None:
    with Delta(path.parent) as delta:
        delta.rows()
        delta.dense()


def _trace(folder: Path) -> Path:
    times = [np.random.default_rng(0).uniform(500, 1500, (1, 3)) for _ in range(3)]
    path = folder / "rank0.json"
    path.write_text(json.dumps(GlooJob(*times).traces(np.zeros(1))[0]))
    return path


def _packed_trace(folder: Path) -> Path:
    path = folder / "rank0.json.gz"
    path.write_bytes(gzip.compress(_trace(folder).read_bytes()))
    return path


def _channel_trace(folder: Path) -> Path:
    path = folder / "rank0.json"
    events = [
        {
            **{"ph": "X", "pid": 1, "tid": 1, "ts": 100.0 * step + 10 * number, "dur": 5.0},
            "name": f"bls::c {action} seq={step} lag=0 bound=1",
        }
        for step in range(4)
        for number, action in enumerate(("post", "wait"))
    ]
    job = {"rank": 0, "world_size": 1}
    path.write_text(json.dumps({"distributedInfo": job, "traceEvents": events}))
    return path


def _read_trace(path: Path) -> None:
    said = StringIO()
    with redirect_stdout(StringIO()), redirect_stderr(said):
        status = run(["trace", str(path), f"--perfetto={path.with_suffix('.joined')}"])
    if status:
        assert status == 1
        raise ValueError(said.getvalue())


def _execution_trace(folder: Path) -> Path:
    tensor: list[Any] = [90, 7, 0, 4, 4, "cpu"]
    nodes = [
        {
            "name": "aten::add",
            "inputs": {"values": [[tensor, [tensor]], "<Object>", 1.5]},
            "attrs": [{"name": "rf_id", "type": "uint64", "value": number}],
        }
        for number in range(4)
    ]
    path = folder / "execution.json"
    path.write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "nodes": nodes}))
    return path


KINDS = {
    "profile": Kind(_profile, lambda path: overlap_of(load_profile(path))),
    "measurements": Kind(write_measurements, _read_measurements),
    "plan": Kind(_plan, _read_plan),
    "overlap plan": Kind(_overlap_plan, _read_overlap_plan),
    "model": Kind(_model, read_model),
    "bounds": Kind(_bounds, CodecConfig.from_file),
    "samples": Kind(_samples, _read_samples),
    "batch of samples": Kind(_batch, _read_samples),
    "manifest": Kind(_manifest, _read_manifest),
    "index": Kind(_index, _read_index),
    "tables of a keeper": Kind(_tables_file, read_tables_file),
    "torch file": Kind(_torch_file, _read_checkpoint),
    "safetensors": Kind(_safetensors, _read_checkpoint),
    "metadata of a checkpoint": Kind(_metadata, lambda path: _read_checkpoint(path.parent)),
    "blocks of a checkpoint": Kind(_blocks, lambda path: _read_checkpoint(path.parent)),
    "delta": Kind(_delta, _read_delta),
    "trace": Kind(_trace, _read_trace),
    "packed trace": Kind(_packed_trace, _read_trace),
    "trace of channels": Kind(_channel_trace, _read_trace),
    "execution trace": Kind(_execution_trace, read_execution_trace),
}

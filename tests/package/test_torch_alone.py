"""With torch alone there is the backend; what is made for TorchRec says what is missing."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

# Runs before the package is imported: packages that are not installed, or that must not be touched.
PRELUDE = """
import importlib.abc, importlib.metadata, sys

absent, versions, touched = {absent!r}, {versions!r}, []
installed = importlib.metadata.version

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torchrec", "fbgemm_gpu"):
            touched.append(name)
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

def version(name):
    if name in absent:
        raise importlib.metadata.PackageNotFoundError(name)
    return versions.get(name) or installed(name)

sys.meta_path.insert(0, Blocked())
importlib.metadata.version = version
"""
ALONE = (
    "torchrec",
    "fbgemm-gpu-cpu",
    "fbgemm-gpu",
    "tensordict",
    "torchmetrics",
    "pyre-extensions",
)
LAZY = [
    "BLSConfig",
    "BLSEmbeddingBagCollectionSharder",
    "BLSEmbeddingCollectionSharder",
    "BoundedLagPipeline",
    "CodecConfig",
    "bounded_lag_channels",
    "bounded_lag_modules",
    "record_lookups",
]
DOORS = [
    *(f"torchrec_bls.{name}" for name in LAZY),
    "torchrec_bls.overlap.plan",
    "torchrec_bls.datasets.CriteoDataset",
    "torchrec_bls.datasets.capped_cardinalities",
    "torchrec_bls.sharding.BLSShardingPlanner",
    "torchrec_bls.sharding.load_profile",
]


def start(
    code: str, *, absent: tuple[str, ...] = (), versions: dict[str, str] | None = None
) -> "subprocess.Popen[str]":
    prelude = PRELUDE.format(absent=absent, versions=versions or {})
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", prelude + textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> str:
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    return output


def test_the_backend_and_the_channel_need_torch_alone(tmp_path: Path) -> None:
    code = """
        import torch, torch.distributed as dist
        import torchrec_bls
        from torchrec_bls import BLSOptions, BoundedLagChannel, ErrorBound, VerbsConfig
        from torchrec_bls.observe import gather_report

        rank = {rank}
        dist.init_process_group(
            "cpu:bls",
            init_method="file://{store}",
            rank=rank,
            world_size=2,
            pg_options=BLSOptions(bound=1, transport="shm", deadline=60, verbs=VerbsConfig()),
        )
        out = torch.empty(2, dtype=torch.int64)
        dist.all_to_all_single(out, torch.tensor([10 * rank, 10 * rank + 1]))
        assert out.tolist() == [rank, 10 + rank], out
        with BoundedLagChannel(
            dist.group.WORLD, bound=0, slot_bytes=4096, name="own", deadline=60
        ) as channel:
            channel.post([[torch.full((3,), rank)]] * 2)
            with channel.wait() as arrival:
                assert arrival.tensor(1 - rank, dtype=torch.int64).tolist() == [1 - rank] * 3
        dist.destroy_process_group()
        assert not touched, touched
    """
    ranks = [
        start(code.format(rank=rank, store=tmp_path / "store"), absent=ALONE) for rank in range(2)
    ]
    for rank in ranks:
        finish(rank)


def test_what_is_made_for_torchrec_names_what_is_missing() -> None:
    output = finish(
        start(
            f"""
            import torchrec_bls
            for name in {LAZY}:
                assert name in dir(torchrec_bls)
                try:
                    getattr(torchrec_bls, name)
                except ImportError as error:
                    print(error)
                else:
                    raise AssertionError(name)
            try:
                torchrec_bls.nothing
            except AttributeError as error:
                print(error)
            assert not touched, touched
            """,
            absent=ALONE,
        )
    )
    for name in LAZY:
        assert f"torchrec_bls.{name} is made for TorchRec. torchrec_bls found torch 2." in output
    assert "fbgemm not installed, torchrec not installed" in output
    assert "pip install --no-deps 'torchrec==1." in output
    assert "module 'torchrec_bls' has no attribute 'nothing'" in output


def test_a_pair_that_does_not_match_is_refused_before_it_is_imported() -> None:
    output = finish(
        start(
            f"""
            for door in {DOORS}:
                package, _, name = door.rpartition(".")
                try:
                    exec(f"from {{package}} import {{name}}")
                except ImportError as error:
                    print(error)
                else:
                    raise AssertionError(door)
            from torchrec_bls.codecs.rows import Codec
            from torchrec_bls.codecs.torchrec_codecs import codecs_registry
            try:
                codecs_registry(Codec.FP16, Codec.FP16, 4)
            except ImportError as error:
                print(error)
            else:
                raise AssertionError("codecs_registry")
            assert not touched, touched
            """,
            versions={"torch": "2.13.0", "fbgemm-gpu-cpu": "1.7.0"},
        )
    )
    assert output.count("and fbgemm-gpu-cpu 1.7.0 are not a pair") == len(DOORS) + 1
    for door in DOORS:
        assert f"{door} is made for TorchRec. torchrec_bls found torch 2.13.0" in output
    assert "pip install 'fbgemm-gpu-cpu==1.8.0'" in output


@pytest.mark.slow
def test_an_untested_trio_without_the_private_names_is_refused_with_their_names() -> None:
    output = finish(
        start(
            """
            import types
            sys.meta_path.pop(0)
            import torchrec.distributed.train_pipeline.utils as utils
            import torchrec.distributed.comm_ops as comm_ops

            del utils._rewrite_model, comm_ops.get_gradient_division
            import torchrec_bls
            try:
                torchrec_bls.BLSConfig
            except ImportError as error:
                print(type(error).__name__, error)
            """,
            versions={"torch": "2.15.0", "fbgemm-gpu-cpu": "1.10.0", "torchrec": "1.10.0"},
        )
    )
    refused = "VersionError torchrec_bls.BLSConfig is made for TorchRec. torchrec_bls uses 2 names"
    assert f"{refused} that torch 2.15.0" in output
    assert "torchrec.distributed.train_pipeline.utils._rewrite_model" in output
    assert "torchrec.distributed.comm_ops.get_gradient_division" in output
    assert "Mend it with: pip uninstall -y fbgemm-gpu-cpu && pip install 'torch==2.14.1'" in output


@pytest.mark.slow
def test_names_are_those_of_the_modules() -> None:
    """Where everything is installed, names can be imported, and are imported once."""
    finish(
        start(
            """
            sys.meta_path.pop(0)
            import torchrec_bls
            assert not any(name.startswith("torchrec.") for name in sys.modules)
            from torchrec_bls import *
            from torchrec_bls.distributed.config import BLSConfig as same
            assert BLSConfig is same is vars(torchrec_bls)["BLSConfig"]
            """
        )
    )

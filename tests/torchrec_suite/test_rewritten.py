"""What the runner of TorchRec's tests makes of a test, and of two outcomes."""

import ast

from tests.torchrec_suite.comparison import compare
from tests.torchrec_suite.tree import rewritten

_SOURCE = """
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder as Sharder, Other

@unittest.skipIf(torch.cuda.device_count() <= 1, "not enough GPUs")
@unittest.skipIf(is_asan(), "slow")
@settings(max_examples=6, deadline=None)
def test(self):
    if self.backend == "gloo":
        self.skipTest("no reduce-scatter")
    kernel = EmbeddingComputeKernel.FUSED_UVM.value
    run(backend="nccl", device=torch.device(f"cuda:{rank}"), optimizer=EmbOptimType.ADAM)
"""
_REWRITTEN = """
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder as Sharder, Other
from tests.torchrec_suite.sharders import EmbeddingBagCollectionSharder as Sharder

@unittest.skipIf(False, "not enough GPUs")
@unittest.skipIf(is_asan(), "slow")
@settings(max_examples=2, deadline=None)
def test(self):
    if False:
        self.skipTest("no reduce-scatter")
    kernel = EmbeddingComputeKernel.FUSED.value
    run(backend="gloo", device=torch.device("cpu"), optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD)
"""


def test_a_test_runs_on_cpus_with_the_sharders_of_the_run() -> None:
    assert rewritten(_SOURCE) == ast.unparse(ast.parse(_REWRITTEN))


def test_a_planners_test_keeps_its_gpus() -> None:
    rest = rewritten(_SOURCE, on_cpus=False)
    assert "tests.torchrec_suite.sharders" in rest and "nccl" in rest and "FUSED_UVM" in rest


def test_only_what_passes_with_torchrecs_sharders_has_to_pass() -> None:
    refused = "ValueError: table 't' is planned with compute kernel dense, but only fused"
    outcomes = {
        "a": ("passed", "passed"),
        "b": ("AssertionError: not close", "passed"),
        "c": ("passed", refused),
        "d": ("passed", "AssertionError: not close\nmore"),
        "e": ("RuntimeError: no CUDA", "RuntimeError: no CUDA"),
        "f": ("skipped", "skipped"),
        "g": ("passed", None),
    }
    verdicts = compare(
        {name: control for name, (control, _) in outcomes.items()},
        {name: ours for name, (_, ours) in outcomes.items() if ours is not None},
    )
    kinds = [verdict.kind for verdict in verdicts.values()]
    assert kinds == [
        "both pass",
        "better",
        "refused",
        "worse",
        "both fail",
        "skipped",
        "worse",
    ]
    assert verdicts["c"].page == "docs/design/torchrec-seam.md"
    assert verdicts["d"].text == "AssertionError: not close"

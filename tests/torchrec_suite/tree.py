"""A copy of a TorchRec checkout whose tests run on CPUs, with the sharders of a run."""

import ast
import shutil
from pathlib import Path

#: Environment variable of a run's mode, "torchrec" or "bls", which processes of ranks inherit.
MODE = "TORCHREC_BLS_SUITE"
#: TorchRec's sharders in whose places `sharders` has those of the run.
NAMES = {
    "EmbeddingBagCollectionSharder",
    "EmbeddingCollectionSharder",
    "QuantEmbeddingBagCollectionSharder",
    "QuantEmbeddingCollectionSharder",
}
# Examples of a test that hypothesis draws.
_MOST_EXAMPLES = 2
_CPU_FOR = {"nccl": "gloo", "cuda": "cpu", "cuda:0": "cpu", "fused_uvm": "fused"}
_FOR_ATTRIBUTES = {
    ("EmbeddingComputeKernel", "FUSED_UVM"): "FUSED",
    ("EmbeddingComputeKernel", "FUSED_UVM_CACHING"): "FUSED",
    # FBGEMM has no Adam for CPUs.
    ("EmbOptimType", "ADAM"): "EXACT_ROWWISE_ADAGRAD",
    ("OptimType", "ADAM"): "EXACT_ROWWISE_ADAGRAD",
}
# They compute plans for GPUs, and need none.
_AS_THEY_ARE = ("planner", "test_sharding_plan.py")


def make_tree(checkout: Path, tree: Path) -> None:
    """Copies the package `torchrec` of `checkout` to `tree`, and rewrites its tests.

    Raises:
        ValueError: `checkout` has no tests of TorchRec.
    """
    package = checkout / "torchrec"
    if not (package / "distributed" / "test_utils").is_dir():
        raise ValueError(
            f"{checkout} has no torchrec/distributed/test_utils: give a checkout of TorchRec's "
            "release branch"
        )
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(package, tree / "torchrec")
    for path in (tree / "torchrec").rglob("*.py"):
        if {"tests", "test_utils"} & set(path.parts):
            on_cpus = not set(_AS_THEY_ARE) & set(path.parts)
            path.write_text(rewritten(path.read_text(), on_cpus=on_cpus))


def rewritten(source: str, *, on_cpus: bool = True) -> str:
    """Returns the source of a test for the sharders of this run, and for CPUs if asked."""
    rewriter = _OnCpus() if on_cpus else _WithOurSharders()
    return ast.unparse(ast.fix_missing_locations(rewriter.visit(ast.parse(source))))


class _WithOurSharders(ast.NodeTransformer):
    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.stmt]:
        """Has the sharders of this run follow TorchRec's."""
        swapped = [alias for alias in node.names if alias.name in NAMES]
        if not swapped or not (node.module or "").startswith("torchrec.distributed"):
            return [node]
        return [node, ast.ImportFrom(module=f"{__package__}.sharders", names=swapped, level=0)]


class _OnCpus(_WithOurSharders):
    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Lifts what a test asks of GPUs, and bounds its examples."""
        self.generic_visit(node)
        name = ast.unparse(node.func)
        if name in ("unittest.skipIf", "unittest.skipUnless") and _names_a_gpu(node.args[0]):
            node.args[0] = ast.Constant(name == "unittest.skipUnless")
        if name == "settings":
            for keyword in node.keywords:
                if keyword.arg == "max_examples" and isinstance(keyword.value, ast.Constant):
                    keyword.value.value = min(keyword.value.value, _MOST_EXAMPLES)
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        """Lifts skips on gloo: bounded-lag exchanges have none of the limits that they are for."""
        self.generic_visit(node)
        asks = ast.unparse(node.test)
        if "gloo" in asks and any("skipTest" in ast.unparse(each) for each in node.body):
            node.test = ast.Constant(False)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        """Has the CPU stand for devices and backends of GPUs."""
        if isinstance(node.value, str) and node.value in _CPU_FOR:
            node.value = _CPU_FOR[node.value]
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """Has the CPU stand for the device of a rank."""
        self.generic_visit(node)
        first = node.values[0] if node.values else None
        if isinstance(first, ast.Constant) and first.value == "cuda:":
            return ast.Constant("cpu")
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Has kernels and optimizers of the CPU stand for those of GPUs."""
        self.generic_visit(node)
        owner = ast.unparse(node.value).rpartition(".")[2]
        node.attr = _FOR_ATTRIBUTES.get((owner, node.attr), node.attr)
        return node


def _names_a_gpu(condition: ast.expr) -> bool:
    return "torch.cuda" in ast.unparse(condition)

"""Runs TorchRec's tests with its sharders and with ours: python -m tests.torchrec_suite DIR."""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

from tests.paths import ROOT
from tests.torchrec_suite.comparison import Verdict, compare
from tests.torchrec_suite.tree import MODE, make_tree

_DISTRIBUTED = "torchrec/distributed"
# A sharder of embeddings takes part in each, and none needs a GPU once `tree` has rewritten it.
FILES = (
    "tests/test_model_parallel_gloo.py",
    "tests/test_model_parallel_hierarchical.py",
    "tests/test_model_parallel_nccl_single_rank.py",
    "tests/test_sequence_model_parallel.py",
    "tests/test_sequence_model_parallel_single_rank.py",
    "tests/test_fp_embeddingbag.py",
    "tests/test_fp_embeddingbag_single_rank.py",
    "tests/test_init_parameters.py",
    "tests/test_dynamic_sharding.py",
    "tests/test_apply_optim_per_param.py",
    "tests/test_apply_optimizer_to_dense_tbe.py",
    "tests/test_emb_anomaly.py",
    "tests/test_qcomms_embedding_modules.py",
    "tests/test_sharding_plan.py",
    "composable/tests/test_embedding.py",
    "composable/tests/test_embeddingbag.py",
    "composable/tests/test_ddp.py",
    "composable/tests/test_fused_optim.py",
    "train_pipeline/tests/test_train_pipelines.py",
    "train_pipeline/tests/test_backward_injection.py",
    "train_pipeline/tests/test_gradient_accumulation.py",
    "model_tracker/tests/test_model_delta_tracker.py",
    "planner/tests/test_planners.py",
    "planner/tests/test_enumerators.py",
)


def main() -> None:
    """Prints counts by file, and each difference. Ends with 1 if only TorchRec's sharders pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="checkout of TorchRec's release branch")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "torchrec-suite")
    parser.add_argument(
        "--only", nargs="*", default=FILES, help="files, below torchrec/distributed"
    )
    options = parser.parse_args()
    try:
        make_tree(options.checkout, options.out / "tree")
    except ValueError as error:
        sys.exit(str(error))
    files = [f"{_DISTRIBUTED}/{name}" for name in options.only]
    control, ours = (_run(mode, options.out.resolve(), files) for mode in ("torchrec", "bls"))
    verdicts = compare(control, ours)
    (options.out / "verdicts.json").write_text(
        json.dumps({name: verdict._asdict() for name, verdict in verdicts.items()}, indent=1)
    )
    _print(verdicts)
    if worse := [name for name, verdict in verdicts.items() if verdict.kind == "worse"]:
        sys.exit(f"{len(worse)} examples pass with TorchRec's sharders and fail with ours")


def _run(mode: str, out: Path, files: list[str]) -> dict[str, str]:
    record = out / f"{mode}.json"
    record.unlink(missing_ok=True)
    environment = os.environ | {
        MODE: mode,
        "TORCHREC_BLS_SUITE_RECORD": str(record),
        "PYTHONPATH": os.pathsep.join([str(out / "tree"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
    }
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.torchrec_suite.plugin",
        "-c",
        os.devnull,
    ]
    options.append("--continue-on-collection-errors")
    with (out / f"{mode}.log").open("w") as log:
        print(f"{mode}: {len(files)} files; what pytest says goes to {log.name}", flush=True)
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, "--rootdir", ".", *files],
            cwd=out / "tree",
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,  # TorchRec's own sharders fail many of these tests on CPUs
        )
    outcomes: dict[str, str] = json.loads(record.read_text()) if record.exists() else {}
    ran = {name.partition("::")[0] for name in outcomes}
    if missing := [file for file in files if file not in ran]:
        sys.exit(f"{mode}: nothing ran of {missing}: see {out / f'{mode}.log'}")
    return outcomes


def _print(verdicts: dict[str, Verdict]) -> None:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for name, verdict in verdicts.items():
        counts[name.partition("::")[0].removeprefix(f"{_DISTRIBUTED}/")][verdict.kind] += 1
    kinds = ("both pass", "better", "refused", "worse", "both fail", "skipped")
    print(f"\n{'':52}" + "".join(f"{kind:>11}" for kind in kinds))
    for file, of_file in counts.items():
        print(f"{file:52}" + "".join(f"{of_file[kind] or '':>11}" for kind in kinds))
    total: Counter[str] = sum(counts.values(), Counter())
    print(f"{'all':52}" + "".join(f"{total[kind]:>11}" for kind in kinds) + "\n")
    for kind in ("worse", "refused"):
        for name, verdict in verdicts.items():
            if verdict.kind == kind:
                print(f"{kind}: {name.partition('::')[2]}\n    {verdict.text[:200]}")


if __name__ == "__main__":
    main()

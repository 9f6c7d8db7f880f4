"""Versions from checkpoints: FBGEMM's bits of their rows, or a refusal and the old version."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.processes import run
from tests.quant import served
from tests.quant.served import Expected, batches_of, check, check_live, unsharded, weights_of
from torchrec_bls import Publication, publish, serving_state
from torchrec_bls.direct.serving.served_model import ServedModel

DEADLINE = 60.0
CHANGED = "bags.embedding_bags.b2.weight"


class Mixed(Expected):
    """Of version 10 * n + m: weights of version n, but for one table, which is of m."""

    def _model(self, number: int) -> Any:
        model = served.Model()
        model.load_state_dict(mixed(number))
        return served.quantized(model)


def mixed(number: int) -> dict[str, torch.Tensor]:
    new = weights_of(number // 10)
    return {**new, CHANGED: weights_of(number % 10)[CHANGED]}


def saved(folder: Path, number: int) -> Path:
    path = folder / f"{number}.pt"
    torch.save(mixed(number), path)
    return path


def pieces_of(model: Any) -> list[list[tuple[str, int]]]:
    """Returns version and inode of each piece, for each module."""
    generations = ServedModel.of(model).publisher.follower.newest
    return [
        [(piece.version, piece.segment.address[3]) for part in each.parts for piece in part.pieces]
        for each in generations
    ]


def publish_files(rank: int, folder: str) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Mixed(batches)
    with torch.no_grad():
        model(batches[0])

    def change_to(number: int, path: Path) -> Publication:
        published = publish(model, checkpoint=path, version=str(number), deadline=DEADLINE)
        published.wait(DEADLINE)
        for batch in range(len(batches)):
            assert check(model, batches, expected, batch) == number
        return published

    first = change_to(22, saved(Path(folder), 22))
    assert first.bytes_reused == 0 < first.bytes_written
    before = pieces_of(model)
    second = change_to(23, saved(Path(folder), 23))
    after = pieces_of(model)
    # Of the module with that table some pieces are new, and of the others none.
    assert before[1:] == after[1:]
    new = [piece for piece, old in zip(after[0], before[0], strict=True) if piece != old]
    assert 0 < len(new) < len(after[0]) and {version for version, _ in new} == {"23"}
    assert second.bytes_written + second.bytes_reused == first.bytes_written
    assert 0 < second.bytes_written < first.bytes_written
    # The same rows under another name are all there, and so are those of another kind of file.
    assert change_to(23, saved(Path(folder), 23)).was_announced
    distributed = Path(folder) / "distributed"
    dcp.save(mixed(23), checkpoint_id=distributed, no_dist=True)
    again = publish(model, checkpoint=distributed, version="as before", deadline=DEADLINE)
    again.wait(DEADLINE)
    assert again.bytes_written == 0 and pieces_of(model) == after
    # Stored rows are other source bytes.
    torch.save(unsharded(3).state_dict(), Path(folder) / "stored.pt")
    stored = change_to(33, Path(folder) / "stored.pt")
    assert stored.bytes_reused < stored.bytes_written
    check_live(model, 3)


def test_a_checkpoint_has_the_bits_of_fbgemms_lookup_in_one_process(tmp_path: Path) -> None:
    run(1, publish_files, str(tmp_path))


def publish_rows_of_two_owners(rank: int, folder: str) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Mixed(batches)
    with torch.no_grad():
        model(batches[0])
    for number in (22, 32):
        path = Path(folder) / f"{number}.pt"
        if rank == 0:
            saved(Path(folder), number)
        dist.barrier()
        publish(model, checkpoint=path, version=str(number), deadline=DEADLINE).wait(DEADLINE)
        for batch in range(len(batches)):
            assert check(model, batches, expected, batch) == number
        dist.barrier()


def test_each_owner_reads_its_own_rows(tmp_path: Path) -> None:
    run(2, publish_rows_of_two_owners, str(tmp_path))


def without(name: str) -> dict[str, torch.Tensor]:
    return {each: value for each, value in mixed(33).items() if each != name}


def with_value(row: int, value: float) -> dict[str, torch.Tensor]:
    new = mixed(33)
    new[CHANGED][row, 3] = value
    return new


BAD: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "missing table": (without(CHANGED), f"has no '{CHANGED}'"),
    "missing dense weights": (without("dense.bias"), "has no 'dense.bias'"),
    "extra table": (
        {**mixed(33), "rows.embeddings.r9.weight": torch.zeros(3, 16)},
        r"it has tables \['r9'\] in 'rows.embeddings', which the model lacks",
    ),
    "other rows": (
        {**mixed(33), CHANGED: mixed(33)[CHANGED][:-1]},
        rf"'{CHANGED}' has the shape \(1020, 24\) .*, but its table is \(1021, 24\)",
    ),
    "other columns of a float table": (
        {**mixed(33), "plain.embedding_bags.p0.weight": torch.zeros(700, 16)},
        r"'plain.embedding_bags.p0.weight' has shape \[700, 16\], but the model's has \[700, 8\]",
    ),
    "dtype": (
        {**mixed(33), CHANGED: mixed(33)[CHANGED].double()},
        rf"'{CHANGED}' is torch.float64",
    ),
    "nan": (with_value(1000, float("nan")), rf"'{CHANGED}' has NaN .*, in row 1000 "),
    "infinity": (with_value(7, float("inf")), rf"'{CHANGED}' has NaN or inf.*, in row 7 "),
}


def refuse_files(rank: int, folder: str) -> None:
    model, batches = served.sharded(), batches_of(rank)
    expected = Mixed(batches)
    with torch.no_grad():
        model(batches[0])
    publish(model, checkpoint=saved(Path(folder), 22), version="22").wait(DEADLINE)

    def refused(path: Path, says: str) -> None:
        with pytest.raises(ValueError, match=says) as caught:
            publish(model, checkpoint=path, version="33")
        assert str(path) in str(caught.value)
        state = serving_state(model)
        assert state.announced == "22" and not state.pending and not state.problem
        assert check(model, batches, expected, 1) == 22

    for name, (content, says) in BAD.items():
        path = Path(folder) / f"{name}.pt"
        torch.save(content, path)
        refused(path, says)
    refused(Path(folder) / "nothing", "")
    cut_off = saved(Path(folder), 33)
    cut_off.write_bytes(cut_off.read_bytes()[:-1000])
    refused(cut_off, "")
    torch.save({f"module.{name}": each for name, each in mixed(33).items()}, cut_off)
    refused(cut_off, "has no '")
    with pytest.raises(ValueError, match="not as both"):
        publish(model, mixed(33), checkpoint=cut_off, version="33")
    # Entries beside the tables that the model lacks do not matter.
    torch.save({**mixed(33), "optimizer.step": torch.zeros(1)}, cut_off)
    publish(model, checkpoint=cut_off, version="33").wait(DEADLINE)
    assert check(model, batches, expected, 1) == 33


def test_files_that_do_not_fit_are_refused_and_the_old_version_serves(tmp_path: Path) -> None:
    run(1, refuse_files, str(tmp_path))

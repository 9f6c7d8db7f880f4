"""A tracker learns the same ids from notes as from the lookups themselves."""

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.direct.trained import SHARDERS, Training
from tests.processes import run
from torchrec_bls import lookup_notes
from torchrec_bls.delta_writer import _tracker_of
from torchrec_bls.lookup_notes import LookupNotes


def compare_trackers(rank: int, sharders: str, steps: int) -> None:
    expected = ids_of(Training(rank, "torchrec"), steps, takes_notes=False)
    found = ids_of(Training(rank, sharders), steps, takes_notes=True)
    assert found.keys() == expected.keys() and len(found) > 4
    for name, ids in expected.items():
        assert torch.equal(found[name].sort().values, ids.sort().values), name


def ids_of(training: Training, steps: int, takes_notes: bool) -> dict[str, torch.Tensor]:
    """Returns the ids of some steps, by table, of a tracker that follows the lookups or notes."""
    tracker = _tracker_of(training.model)
    notes = LookupNotes(tracker) if takes_notes else None
    training.train(1)
    tracker.clear()
    if notes is not None:
        notes.clear()
    training.train(steps)
    if notes is not None:
        notes.tell_tracker()
    ids: dict[str, torch.Tensor] = tracker.get_unique_ids()
    if notes is not None:
        # What was told is told once.
        notes.tell_tracker()
        assert all(not lookups for lookups in tracker.store.per_fqn_lookups.values())
    return ids


@pytest.mark.parametrize("sharders", SHARDERS)
@pytest.mark.parametrize("steps", [1, 5])
def test_a_tracker_learns_what_it_learns_from_torchrecs_lookups(sharders: str, steps: int) -> None:
    run(2, compare_trackers, sharders, steps)


class Told:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.lookups: list[KeyedJaggedTensor] = []

    def get_tracked_modules(self) -> dict[str, object]:
        return {}

    def record_lookup(self, features: KeyedJaggedTensor, states: torch.Tensor) -> None:
        self.lookups.append(features)


def test_batches_of_the_same_keys_come_together() -> None:
    told = Told()
    notes = LookupNotes(told)

    def look_up(keys: list[str], values: list[int], lengths: list[int]) -> torch.Tensor:
        ids = torch.tensor(values)
        notes.note(KeyedJaggedTensor(keys, ids, lengths=torch.tensor(lengths)), None, None, None)
        return ids

    first = look_up(["a", "b"], [1, 2, 3], [1, 1, 0, 1])
    look_up(["c"], [9], [1])
    look_up(["a", "b"], [4, 5], [0, 0, 2, 0])
    first.zero_()  # the memory is another batch's
    notes.tell_tracker()
    together = {
        key: values.values().tolist()
        for each in told.lookups
        for key, values in each.to_dict().items()
    }
    assert together == {"a": [1, 2], "b": [3, 4, 5], "c": [9]}
    assert len(told.lookups) == 2
    notes.tell_tracker()
    assert len(told.lookups) == 2


def test_notes_of_a_long_training_have_each_id_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_notes, "_MOST_NEW", 8)
    told = Told()
    notes = LookupNotes(told)
    for batch in range(100):
        ids = torch.tensor([batch % 5, 7, 7, batch % 3])
        notes.note(KeyedJaggedTensor(["a", "b"], ids, lengths=torch.tensor([1, 3])))
        assert sum(len(each.ids) for each in notes._noted) <= 2 * (5 + 4) + 8
    notes.tell_tracker()
    (lookup,) = told.lookups
    ids_of_keys = {key: values.values().tolist() for key, values in lookup.to_dict().items()}
    assert ids_of_keys == {"a": [0, 1, 2, 3, 4], "b": [0, 1, 2, 7]}

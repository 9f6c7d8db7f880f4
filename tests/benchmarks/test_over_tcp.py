"""Open MPI at its best settings, with as many samples of each cell as it has turns."""

import pytest

from benchmarks.exchange import native, over_tcp

FAST, SLOW = (8, 0, 0), (8, 0, 2)


def test_a_setting_that_becomes_slower_keeps_its_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[str, list[tuple[int, int, int]]]] = []

    def run(_: object, parameters: dict[str, str], cells: list[tuple[int, int, int]]) -> object:
        runs.append((parameters["idle"], cells))
        slower = 100.0 if len(runs) > 2 else 0.0
        of_cell = {FAST: {"0": 1.0, "1": 2.0}, SLOW: {"0": 4.0, "1": 3.0}}
        return [(of_cell[cell][parameters["idle"]] + slower, 0.0) for cell in cells]

    monkeypatch.setattr(over_tcp.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(
        native, "mpi_yields", lambda _: {"poll": {"idle": "0"}, "yield": {"idle": "1"}}
    )
    monkeypatch.setattr(over_tcp.OpenMpi, "_run", run)
    mpi = over_tcp.OpenMpi([FAST, SLOW], 0.1)
    for _ in range(3):
        mpi.sweep()
    assert mpi.samples(FAST) == [(1, 0), (101, 0), (101, 0)]
    assert mpi.samples(SLOW) == [(3, 0), (103, 0), (103, 0)]
    assert runs[:2] == [("0", [FAST, SLOW]), ("1", [FAST, SLOW])]
    assert runs[2:] == 2 * [("0", [FAST]), ("1", [SLOW])]

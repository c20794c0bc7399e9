"""The stored grids: complete, as declared, and recomputed at a random handful of cells."""

import os
import random

import pandas as pd
import pytest

from lowgrad_utils import grids, sweeps

# Fresh cells in each run, so that in time every cell is recomputed; the number repeats a failure.
SEED = int(os.environ.get("LOWGRAD_SPOT_CHECK_SEED", random.SystemRandom().randrange(10**6)))


@pytest.mark.parametrize("name", grids.GRIDS)
def test_stored_grid_has_the_declared_cells_and_no_others(name):
    grid = grids.GRIDS[name]
    declared = pd.DataFrame(grid.cells).sort_values(grid.parameters, ignore_index=True)
    stored = grids.stored(name)[grid.parameters]
    stored = stored.sort_values(grid.parameters, ignore_index=True)
    pd.testing.assert_frame_equal(stored, declared, check_dtype=False)


@pytest.mark.parametrize("name", grids.GRIDS)
def test_a_random_handful_of_cells_is_recomputed(name):
    grid = grids.GRIDS[name]
    print(f"repeat with LOWGRAD_SPOT_CHECK_SEED={SEED}")
    checked = sweeps.spot_check(
        grids.stored(name)[: grid.first],
        grid.function,
        cells=grid.spot,
        seed=SEED,
        rtol=grid.rtol,
        # Second singular values of rank-one cells are rounding, which no two machines share.
        atol=grid.atol,
        parameters=grid.parameters,
    )
    assert len(checked.drop_duplicates(grid.parameters)) == grid.spot


def test_a_changed_number_is_found():
    name = "figure-1"
    stored = grids.stored(name).head(3).copy()
    stored.loc[stored.index[1], "S2"] *= 1 + 1e-5
    with pytest.raises(sweeps.SweepError, match="S2"):
        sweeps.spot_check(
            stored,
            grids.GRIDS[name].function,
            cells=3,
            seed=0,
            rtol=1e-6,
            parameters=grids.GRIDS[name].parameters,
        )


def test_a_computation_goes_on_where_it_stopped(tmp_path, monkeypatch):
    calls = []

    def cell(x):
        calls.append(x)
        if x == 2 and len(calls) < 4:
            raise KeyboardInterrupt
        return {"square": x**2}

    tiny = grids.Grid(cell, tuple({"x": x} for x in range(4)), "squares")
    monkeypatch.setitem(grids.GRIDS, "tiny", tiny)
    monkeypatch.setattr(grids, "grid_path", lambda name: tmp_path / "grids" / f"{name}.csv")
    log = tmp_path / "tiny.jsonl"
    with pytest.raises(KeyboardInterrupt):
        grids.compute("tiny", workers=1, log=log)
    assert not (tmp_path / "grids" / "tiny.csv").exists()
    grids.compute("tiny", workers=1, log=log)
    assert calls == [0, 1, 2, 2, 3]
    stored = grids.stored("tiny")
    assert dict(zip(stored.x, stored.square)) == {0: 0, 1: 1, 2: 4, 3: 9}
    assert stored.attrs["provenance"]["command"] == "python -m lowgrad_utils.grids tiny"


def test_a_failed_cell_stores_nothing(tmp_path, monkeypatch):
    tiny = grids.Grid(lambda x: {"inverse": 1 / x}, ({"x": 1}, {"x": 0}), "inverses")
    monkeypatch.setitem(grids.GRIDS, "tiny", tiny)
    monkeypatch.setattr(grids, "grid_path", lambda name: tmp_path / f"{name}.csv")
    with pytest.raises(RuntimeError, match="1 cells failed, first: ZeroDivisionError"):
        grids.compute("tiny", workers=1, log=tmp_path / "tiny.jsonl")
    assert not (tmp_path / "tiny.csv").exists()


def test_an_unknown_grid_is_named():
    with pytest.raises(ValueError, match="name is 'theorem-9', but one of theorem-3-1, figure-1"):
        grids.stored("theorem-9")

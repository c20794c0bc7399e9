"""The command that repeats the ledger's measurements on fresh random numbers."""

import os

import pandas as pd
import pytest
import reseed
from book_sources import BookError

from lowgrad_utils import checks, claims, figures, grids, sweeps
from lowgrad_utils.spiked_data import sample_spiked_data

CELLS = [
    "from lowgrad_utils import claims, figures, grids\n"
    "from lowgrad_utils.spiked_data import sample_spiked_data",
    "draw = sample_spiked_data(3, 4, nu=0.0, seed=0).z\nfigures.show(None, alt='', caption='')",
    "claims.settle('lrg.prop-2.1', relative_error=[abs(float(draw[0]))], "
    "second_over_first=0.0, sizes=[4], seeds=[0])\nprint('not seen')",
]


@pytest.fixture
def chapter(monkeypatch):
    """A chapter of three cells that settles a row on what it draws."""
    seen = []

    def evaluate(claim_id, **measured):
        seen.append(measured["relative_error"][0])
        return pd.Series({"verdict": "holds", "measured": repr(seen[-1])})

    monkeypatch.setattr(reseed, "code_cells", lambda name: CELLS)
    monkeypatch.setattr(claims, "evaluate", evaluate)
    return seen


def test_a_run_draws_other_numbers_and_leaves_everything_as_it_was(chapter, capsys):
    before = (claims.settle, figures.show, grids.stored, os.getcwd(), dict(os.environ))
    usual = abs(float(sample_spiked_data(3, 4, nu=0.0, seed=0).z[0]))
    found = [reseed.repeat("any", k, False, "digest") for k in (1, 2, 1)]
    assert chapter[0] == chapter[2]
    assert len({usual, *chapter}) == 3
    assert found[0] == {"lrg.prop-2.1": "holds", "lrg.prop-2.1 measured": repr(chapter[0])}
    assert "not seen" not in capsys.readouterr().out
    assert (claims.settle, figures.show, grids.stored, os.getcwd(), dict(os.environ)) == before


def test_an_error_in_a_cell_names_it_and_leaves_everything_as_it_was(monkeypatch):
    monkeypatch.setattr(reseed, "code_cells", lambda name: ["x = 1", "1 / 0"])
    before = claims.settle
    with pytest.raises(ZeroDivisionError) as failure:
        reseed.repeat("any", 1, False, "digest")
    assert "any, code cell 1" in str(failure.traceback[-1].path)
    assert claims.settle is before
    assert checks.FRESH_SEEDS_VARIABLE not in os.environ


def test_resampling_draws_whole_rows_and_keeps_pairs():
    frame = pd.DataFrame(sweeps.grid(d=[1, 2], seed=range(40))).assign(
        value=lambda t: 100 * t.d + t.seed
    )
    frame = pd.concat([frame, frame.iloc[:10].assign(d=3, value=lambda t: 300 + t.seed)])
    drawn = reseed.resampled(frame.sample(frac=1, random_state=0), ["d"], 1)
    drawn = drawn.sort_values(["d", "seed"], ignore_index=True)
    assert drawn[["d", "seed"]].equals(frame[["d", "seed"]].reset_index(drop=True))
    assert (drawn.value // 100 == drawn.d).all()
    # Of 40 draws from 40 about 1 - 1/e are distinct.
    for _, group in drawn[drawn.d < 3].groupby("d"):
        assert 15 < group.value.nunique() < 35
    # What has the same seeds stays paired; what has others is drawn on its own.
    first, second, third = (drawn.value[drawn.d == d].to_numpy() % 100 for d in (1, 2, 3))
    assert first.tolist() == second.tolist()
    assert first[:10].tolist() != third.tolist()
    assert drawn.equals(
        reseed.resampled(frame, ["d"], 1).sort_values(["d", "seed"], ignore_index=True)
    )
    assert not drawn.value.equals(reseed.resampled(frame, ["d"], 2).value)


def test_cheap_grids_are_computed_anew_and_dear_ones_resampled(tmp_path, monkeypatch):
    def cell(d, seed):
        return {"value": float(sample_spiked_data(2, d, nu=0.0, seed=seed).z[0])}

    tiny = grids.Grid(cell, tuple(sweeps.grid(d=[2, 3], seed=range(3))), "draws")
    monkeypatch.setitem(grids.GRIDS, "tiny", tiny)
    monkeypatch.setattr(grids, "grid_path", lambda name: tmp_path / f"{name}.csv")
    monkeypatch.setattr(reseed, "ROOT", tmp_path)
    stored = grids.compute("tiny", workers=1, log=tmp_path / "log")["value"].tolist()
    monkeypatch.setenv(checks.FRESH_SEEDS_VARIABLE, "1")
    assert not set(reseed.another_grid("tiny", 1, False)["value"]) & set(stored)
    monkeypatch.setattr(reseed, "CHEAP", -1)
    assert set(reseed.another_grid("tiny", 1, False)["value"]) <= set(stored)
    assert not set(reseed.another_grid("tiny", 1, True)["value"]) & set(stored)


def test_chapters_that_do_not_exist_are_named():
    with pytest.raises(BookError, match="no chapter 'theorem-9'; there are how-to-read"):
        reseed.document("theorem-9")


def test_grids_are_found_by_their_names_in_the_code():
    assert reseed.grids_of("theorem-3-1") == ["theorem-3-1", "figure-1"]
    assert reseed.grids_of("gradient") == []


def test_the_summary_counts_expected_verdicts_fewest_first():
    runs = pd.DataFrame(
        {
            "chapter": "c",
            "claim": ["a", "a", "b", "b"],
            "grids": "none",
            "expected": "holds",
            "verdict": ["holds", "holds", "fails", "holds"],
        }
    )
    assert reseed.summary(runs)[["claim", "sum", "count"]].values.tolist() == [
        ["b", 1, 2],
        ["a", 2, 2],
    ]


def test_runs_of_one_chapter_leave_those_of_others():
    stored = sweeps.load_grid(reseed.TABLE)
    own = stored[stored["chapter"] == "relu"].assign(verdict="anew")
    both = reseed.merged(stored, own)
    kept = stored[stored["chapter"] != "relu"].reset_index(drop=True)
    pd.testing.assert_frame_equal(both[: len(kept)], kept)
    assert len(both) == len(stored)
    assert set(both["verdict"][len(kept) :]) == {"anew"}


def test_the_stored_runs_cover_every_settled_row_and_flip_rarely():
    """Twenty runs a row, with the verdict the row expects in 19 of them, or the row says so."""
    runs = sweeps.load_grid(reseed.TABLE)
    rows = claims.load_registry().items()
    settled = {claim_id: row for claim_id, row in rows if row.status == "settled"}
    assert set(runs["claim"]) == set(settled)
    for claim_id, group in runs.groupby("claim"):
        assert group["fresh"].nunique() == len(group) >= 20
        assert (group["expected"] == settled[claim_id].expected).all()
        same = (group["verdict"] == group["expected"]).sum()
        told = f"{same} of {len(group)}" in settled[claim_id].reason
        assert same >= 0.95 * len(group) or told, claim_id

"""Repeat the ledger's measurements on fresh random numbers and count how often verdicts change.

    python tools/reseed.py [CHAPTER ...] [--runs 20] [--anew 0] [--store]

Run k executes the code cells of each chapter with `LOWGRAD_FRESH_SEEDS=k`, which exchanges every
stream of random numbers; figures are not drawn. A stored grid is computed anew if that takes at
most `CHEAP` minutes (in the first `--anew` runs, at most `DEAR`); otherwise its seeds are drawn
again from the stored ones, with replacement. Finished runs are kept in `_build/reseed` and not
repeated until the chapter's code, its rules or its grids change. `--store` puts the runs into
`data/reseeds.csv`, in the place of earlier ones of the same chapters.
"""

import argparse
import ast
import contextlib
import io
import os
import sys
import zlib
from pathlib import Path
from unittest.mock import patch

import nbformat
import numpy as np
import pandas as pd
from book_sources import BookError, chapter_names, digest, notebooks, page_source
from matplotlib import pyplot as plt

from lowgrad_utils import checks, claims, figures, grids, sweeps

ROOT = Path(__file__).resolve().parent.parent
#: Minutes on one core up to which a stored grid is computed anew, in all runs or in some.
CHEAP, DEAR = 0.15, 10
TABLE = ROOT / "data" / "reseeds.csv"
#: Boxes, texts and pictures: what a reader needs and a verdict does not.
SILENT = ("show", "slider")
# Kept, because a run puts its own in place of it.
STORED = grids.stored


def repeat(chapter: str, fresh: int, anew: bool, source: str) -> dict[str, str]:
    """Execute one chapter on the k-th set of fresh random numbers.

    Args:
        chapter: Stem of the notebook.
        fresh: The number k of the set, at least 1.
        anew: Whether dear grids are computed anew, too.
        source: Digest of what the verdicts follow from; only tells runs apart.

    Returns:
        For each row of the ledger its verdict, and under ``<id> measured`` the numbers.
    """
    found: dict[str, str] = {}

    def settle(claim_id, /, **measurements):
        record = claims.evaluate(claim_id, **measurements)
        found[claim_id], found[f"{claim_id} measured"] = record.verdict, record.measured

    silent = {name: lambda *_, **__: plt.close("all") for name in SILENT}
    namespace: dict[str, object] = {"display": lambda *_: None, "__name__": "__main__"}
    variables = {checks.FRESH_SEEDS_VARIABLE: str(fresh), figures.BOOK_VARIABLE: "1"}
    with (
        contextlib.chdir(ROOT / "chapters"),
        contextlib.redirect_stdout(io.StringIO()),
        patch.dict(os.environ, variables),
        patch.multiple(figures, **silent),
        patch.object(claims, "settle", settle),
        patch.object(grids, "stored", lambda name: another_grid(name, fresh, anew)),
    ):
        for number, cell in enumerate(code_cells(chapter)):
            exec(compile(cell, f"{chapter}, code cell {number}", "exec"), namespace)
    return found


def code_cells(chapter: str) -> list[str]:
    """Return the sources of a chapter's code cells, without magics.

    Args:
        chapter: Stem of the notebook.
    """
    notebook = nbformat.read(page_source(ROOT, document(chapter)), as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def document(chapter: str) -> str:
    """Return the name in the table of contents of a chapter given by its stem.

    Args:
        chapter: Stem of the notebook.

    Raises:
        BookError: If the book has no such chapter.
    """
    for name in notebooks(ROOT):
        if Path(name).name == chapter:
            return name
    raise BookError(f"no chapter '{chapter}'; there are {', '.join(chapter_names(ROOT))}")


def grids_of(chapter: str) -> list[str]:
    """Return the stored grids whose names stand in a chapter's code.

    Args:
        chapter: Stem of the notebook.
    """
    trees = [ast.parse(cell) for cell in code_cells(chapter)]
    words = {n.value for t in trees for n in ast.walk(t) if isinstance(n, ast.Constant)}
    return [name for name in grids.GRIDS if name in words]


def computed(name: str, anew: bool) -> bool:
    """Tell whether a stored grid is computed anew rather than resampled.

    Args:
        name: A key of ``grids.GRIDS``.
        anew: Whether dear ones are.
    """
    return STORED(name).attrs["provenance"]["cpu_minutes"] <= (DEAR if anew else CHEAP)


def another_grid(name: str, fresh: int, anew: bool) -> pd.DataFrame:
    """Return a stored grid on other seeds: computed anew, or resampled where that takes too long.

    Args:
        name: A key of ``grids.GRIDS``.
        fresh: The number of the set of fresh random numbers.
        anew: Whether dear grids are computed anew, too.
    """
    stored, grid = STORED(name), grids.GRIDS[name]
    if not computed(name, anew):
        return resampled(stored, [p for p in grid.parameters if p != "seed"], fresh)
    path = ROOT / "_build" / "reseed" / "grids" / f"{name}.{fresh}.jsonl"
    frame = sweeps.run(grid.function, grid.cells, path=path, progress=False)
    if frame["error"].notna().any():
        raise RuntimeError(f"grid {name}: {frame['error'].dropna().iloc[0]}")
    return frame[stored.columns]


def resampled(frame: pd.DataFrame, cell: list[str], fresh: int) -> pd.DataFrame:
    """Draw the seeds of every series again, with replacement, and number them as before.

    Series with the same seeds get the same draw: what is compared seed by seed stays paired.

    Args:
        frame: A stored grid with a column ``seed``.
        cell: The parameters that make a series together.
        fresh: The number of the draw.
    """
    rows = []
    for _, group in frame.sort_values("seed").groupby(cell, sort=False):
        seeds = group["seed"].to_numpy()
        words = [fresh, zlib.crc32(seeds.tobytes())]
        drawn = np.random.default_rng(words).integers(len(group), size=len(group))
        rows.append(group.iloc[drawn].assign(seed=seeds))
    return pd.concat(rows, ignore_index=True)


def source_key(chapter: str) -> str:
    """Return a digest of what a chapter's verdicts follow from, but for the package's code.

    Args:
        chapter: Stem of the notebook.
    """
    rules = [line for line in claims.rules_listing() if line.split(":")[0] in ids(chapter)]
    stored = [grids.grid_path(name) for name in grids_of(chapter)]
    return digest(stored, *code_cells(chapter), *rules)[:12]


def ids(chapter: str) -> list[str]:
    """Return the ids of the settled rows that a chapter measures.

    Args:
        chapter: Stem of the notebook.
    """
    rows = claims.load_registry().values()
    return [row.id for row in rows if row.chapter == chapter and row.status == "settled"]


def run_chapter(chapter: str, runs: int, anew: int, workers: int) -> pd.DataFrame:
    """Repeat one chapter and return one row a run and statement.

    Args:
        chapter: Stem of the notebook.
        runs: Number of sets of fresh random numbers.
        anew: Number of the first runs in which dear grids are computed anew.
        workers: Number of processes.

    Raises:
        BookError: If a run failed; says where.
    """
    path = ROOT / "_build" / "reseed" / f"{chapter}.jsonl"
    source = source_key(chapter)
    cells = [
        {"chapter": chapter, "fresh": k, "anew": k <= anew, "source": source}
        for k in range(1, runs + 1)
    ]
    # Workers, never this process: a run sets variables and exchanges functions.
    frame = sweeps.run(repeat, cells, path=path, workers=max(workers, 2))
    failed = frame[frame["error"].notna()]
    if len(failed):
        raise BookError(
            f"chapter {chapter}, fresh seeds {failed['fresh'].iloc[0]}: {failed['error'].iloc[0]}"
        )
    names = grids_of(chapter)
    how = {
        anew: ("fresh" if all(computed(name, anew) for name in names) else "resampled")
        for anew in (False, True)
    }
    registry = claims.load_registry()
    return pd.DataFrame(
        {
            "claim": claim_id,
            "chapter": chapter,
            "fresh": row["fresh"],
            "grids": how[row["anew"]] if names else "none",
            "expected": registry[claim_id].expected,
            "verdict": row[claim_id],
            "measured": row[f"{claim_id} measured"],
        }
        for _, row in frame.iterrows()
        for claim_id in ids(chapter)
    )


def summary(runs: pd.DataFrame) -> pd.DataFrame:
    """Count for each statement the runs that gave the expected verdict, fewest first.

    Args:
        runs: The table of ``run_chapter``.
    """
    same = runs["verdict"] == runs["expected"]
    table = runs.assign(same=same).groupby(["chapter", "claim"], sort=False)["same"]
    return table.agg(["sum", "count"]).sort_values("sum", kind="stable").reset_index()


def merged(stored: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Put the runs of some chapters in the place of stored ones, behind those of the others.

    Args:
        stored: A stored table of runs.
        runs: The table of ``run_chapter`` for the chapters that were run.
    """
    others = stored[~stored["chapter"].isin(runs["chapter"])]
    return pd.concat([others, runs], ignore_index=True)


def main() -> int:
    """Repeat chapters from the command line; returns 1 if a verdict changed in over 1 of 20."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chapters", nargs="*", metavar="CHAPTER", help="stems; all by default")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--anew", type=int, default=0, metavar="RUNS")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--store", action="store_true", help=f"write {TABLE.name}")
    arguments = parser.parse_args()
    chapters = [c for c in arguments.chapters or chapter_names(ROOT) if document(c) and ids(c)]
    settings = (arguments.runs, arguments.anew, arguments.workers)
    runs = pd.concat([run_chapter(chapter, *settings) for chapter in chapters], ignore_index=True)
    changed = runs[runs["verdict"] != runs["expected"]]
    for row in changed.itertuples():
        print(f"{row.claim}, run {row.fresh}: {row.verdict}, not {row.expected} ({row.measured})")
    counts = summary(runs)
    print(counts.to_string(index=False))
    if arguments.store:
        options = f"--runs {settings[0]} --anew {settings[1]} --store"
        command = f"python tools/reseed.py {options}"
        if arguments.chapters:
            stored = sweeps.load_grid(TABLE)
            command = f"{stored.attrs['provenance']['command']}; {' '.join(chapters)} {options}"
            runs = merged(stored, runs)
        sweeps.save_grid(runs, TABLE, {"about": __doc__.splitlines()[0], "command": command})
    return int((counts["sum"] < 0.95 * counts["count"]).any())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (BookError, sweeps.SweepError) as error:
        sys.exit(str(error))

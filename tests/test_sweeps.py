import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import dask
import numpy as np
import pandas as pd
import pytest
import torch
from distributed import Client, LocalCluster
from threadpoolctl import threadpool_info

from lowgrad_utils import sweeps
from lowgrad_utils.sweeps import SweepError, grid, run

ROOT = Path(__file__).parent.parent


def quiet(function, cells, **arguments):
    return run(function, cells, progress=False, **arguments)


def irrational(d, seed):
    """A float that no short decimal holds, next to the other kinds of values."""
    value = float(np.random.default_rng([d, seed]).normal()) / 3
    return {"value": value, "count": d * seed, "large": value > 0, "word": f"d={d}\n", "no": np.nan}


def product_of_matrices(d, seed):
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(d, d, generator=generator, dtype=torch.float64)
    blas = [pool["num_threads"] for pool in threadpool_info()]
    return {"norm": (a @ a @ a).sum(), "threads": max(*blas, torch.get_num_threads())}


def deadly(x):
    if x == 0:
        time.sleep(0.3)  # so that an innocent cell is under way when the worker beside it dies
    if x == 3:
        os._exit(1)
    return {"y": x / 7}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rows" / "sweep.jsonl"


def rows_in(path):
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


# --- grids and tables ---------------------------------------------------------------------------


def test_grid_is_the_product_with_the_last_name_fastest():
    assert grid(d=[1, 2], seed=range(2)) == [
        {"d": 1, "seed": 0},
        {"d": 1, "seed": 1},
        {"d": 2, "seed": 0},
        {"d": 2, "seed": 1},
    ]
    with pytest.raises(TypeError, match=r"d is 250, but a list of values is needed, \[250\]"):
        grid(d=250)
    with pytest.raises(TypeError, match="loss is 'mse'"):
        grid(loss="mse")


def test_the_table_has_a_row_a_cell_in_the_order_of_the_grid():
    cells = grid(d=[4, 2], seed=[1, 0])
    table = quiet(irrational, cells)
    assert list(table.columns) == [
        "d",
        "seed",
        "value",
        "count",
        "large",
        "word",
        "no",
        "seconds",
        "error",
    ]
    assert table[["d", "seed"]].to_dict("records") == cells
    assert table["value"].tolist() == [irrational(**cell)["value"] for cell in cells]
    assert table["no"].isna().all() and table["error"].isna().all()
    assert (table["seconds"] >= 0).all()


def test_numpy_and_torch_scalars_become_plain(path):
    cells = [{"d": np.int64(3), "rate": np.float64(0.1)}]
    table = quiet(lambda d, rate: {"a": torch.tensor(rate).double(), "b": d > 2}, cells, path=path)
    assert rows_in(path)[0]["parameters"] == {"d": 3, "rate": 0.1}
    assert table["b"].tolist() == [True]


@pytest.mark.parametrize(
    ("cells", "error", "words"),
    [
        ([], ValueError, "grid is empty"),
        ([{"d": 1}, {"n": 1}], ValueError, r"parameters \['d'\] and \['n'\]"),
        ([{"d": 1}, {"d": 1}], ValueError, "the cell {'d': 1} twice"),
        ([{"d": [1]}], TypeError, "parameter d is a list"),
        ([{"d": np.nan}], ValueError, "parameter d is nan"),
        ([{"seconds": 1}], ValueError, "'seconds', a name kept"),
    ],
)
def test_grids_that_cannot_be(cells, error, words):
    with pytest.raises(error, match=words):
        quiet(irrational, cells)
    with pytest.raises(ValueError, match="workers is 0"):
        quiet(irrational, [{"d": 1, "seed": 1}], workers=0)


# --- files of rows ------------------------------------------------------------------------------


def test_floats_and_all_else_come_back_from_the_file_exactly(path):
    cells = grid(d=[1, 2, 3], seed=range(20))
    first = quiet(irrational, cells, path=path)

    again = quiet(irrational, cells, path=path)
    pd.testing.assert_frame_equal(first, again, check_exact=True)
    extremes = {"a": 5e-324, "b": 1.7976931348623157e308, "c": -0.0, "d": np.inf, "e": 2**53 + 1}
    for _ in range(2):
        table = quiet(lambda x: extremes, [{"x": 1}], path=path.with_name("extremes"))
        assert {name: table[name].item() for name in extremes} == extremes
        assert np.signbit(table["c"].item())


def test_each_row_is_on_the_disk_before_the_next_cell(path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(path.stat().st_size))
    seen = []

    def look(x):
        seen.append((len(path.read_text().splitlines()), len(synced)))
        return {}

    quiet(look, grid(x=range(4)), path=path)
    assert seen == [(k, k) for k in range(1, 5)]
    assert synced[-1] == path.stat().st_size


def test_a_file_cut_at_any_byte_is_completed(path):
    calls = []

    def third(x):
        calls.append(x)
        return {"y": x / 3, "word": "é"}

    cells = grid(x=range(3))
    want = quiet(third, cells, path=path)["y"].tolist()
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        calls.clear()
        assert quiet(third, cells, path=path)["y"].tolist() == want
        kept = max(whole[:cut].count(b"\n") - 1, 0)
        assert calls == list(range(kept, 3))
        assert [row["parameters"]["x"] for row in rows_in(path)] == [0, 1, 2]
        assert path.read_bytes().startswith(whole[: whole[:cut].rfind(b"\n") + 1])


def test_a_grid_grows_and_shrinks_on_one_file(path):
    quiet(irrational, grid(d=[1, 2], seed=[0]), path=path)
    larger = quiet(irrational, grid(seed=[1, 0], d=[1, 2, 3]), path=path)
    assert len(larger) == 6 and len(rows_in(path)) == 6
    assert quiet(irrational, grid(d=[2], seed=[1]), path=path)["count"].tolist() == [2]
    assert len(rows_in(path)) == 6


def test_failed_cells_are_rows_and_are_retried_only_when_asked(path):
    broken, calls = [True], []

    def root(x):
        calls.append(x)
        if x == 1 and broken[0]:
            raise RuntimeError("no\nroot")
        return {"y": x**0.5}

    cells = grid(x=range(3))
    with pytest.warns(UserWarning, match=r"1 of 3 cells failed.*retry_failures=True"):
        table = quiet(root, cells, path=path)
    assert table["error"].tolist() == [None, "RuntimeError: no\nroot", None]
    assert table["y"].isna().tolist() == [False, True, False]
    broken[0] = False
    with pytest.warns(UserWarning, match="1 of 3"):
        quiet(root, cells, path=path)
    assert calls == [0, 1, 2]
    repaired = quiet(root, cells, path=path, retry_failures=True)
    assert calls == [0, 1, 2, 1]
    assert repaired["error"].isna().all() and repaired["y"].tolist() == [0, 1, 2**0.5]
    quiet(root, cells, path=path, retry_failures=True)
    assert calls == [0, 1, 2, 1]


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (3.0, "TypeError: the function returned a float"),
        ({"y": np.ones(2)}, "TypeError: measurement y is a ndarray"),
        ({"x": 1}, r"ValueError: measurements \['x'\] have the name"),
        ({"error": 1}, r"ValueError: measurements \['error'\]"),
    ],
)
def test_results_that_no_row_holds_are_failures(result, words):
    with pytest.warns(UserWarning, match="1 of 1 cells failed"):
        table = quiet(lambda x: result, grid(x=[1]))
    assert pd.Series(table["error"]).str.contains(words).all()


def test_a_file_of_something_else_is_refused_and_left_alone(path):
    def first(x):
        return {"y": x}

    def second(x):
        return {"y": x}

    cells = grid(x=[1])
    quiet(first, cells, path=path)
    before = path.read_bytes()
    for function, other, words in [
        (second, cells, r"holds rows of .*first, not of .*second; delete the file, or"),
        (first, [{"x": 1, "z": 2}], r"has parameters \['x'\], not \['x', 'z'\]"),
        (functools.partial(first, y=1), cells, "holds rows of"),
    ]:
        with pytest.raises(SweepError, match=words):
            quiet(function, other, path=path)
    assert path.read_bytes() == before
    for content in (b"my thesis", b"my thesis\nand more\n", b"{}\n", b"[1]\n", b"\x00\xff\n"):
        path.write_bytes(content)
        with pytest.raises(SweepError, match="not a file of rows"):
            quiet(first, cells, path=path)
        assert path.read_bytes() == content


def test_a_function_whose_code_changed_is_another_but_not_for_a_comment(path, tmp_path):
    def version(text):
        file = tmp_path / f"version{len(list(tmp_path.glob('version*')))}.py"
        file.write_text(text)
        space = {}
        exec(compile(text, file, "exec"), space)
        return space["f"]

    cells = grid(x=[1])
    quiet(version("def f(x):\n    return {'y': x}\n"), cells, path=path)
    quiet(version("def f(x):\n    # why\n    return {'y':   x}\n"), cells, path=path)
    with pytest.raises(SweepError, match="written by another version of f"):
        quiet(version("def f(x):\n    return {'y': 2 * x}\n"), cells, path=path)


def test_a_damaged_line_in_the_middle_is_named(path):
    quiet(irrational, grid(d=[1], seed=[1, 2]), path=path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1][:20] + b"\n" + lines[2])
    with pytest.raises(SweepError, match="line 2, is damaged"):
        quiet(irrational, grid(d=[1], seed=[1, 2]), path=path)


def test_two_runs_do_not_share_a_file(path):
    def nested(x):
        with pytest.raises(SweepError, match="in use by another run"):
            quiet(irrational, grid(d=[1], seed=[1]), path=path)
        return {}

    assert quiet(nested, grid(x=[1]), path=path)["error"].isna().all()


def test_the_bar_counts_what_is_done_and_is_silent_in_the_book(path, capsys, monkeypatch):
    monkeypatch.delenv("LOWGRAD_BOOK", raising=False)
    run(irrational, grid(d=[1], seed=[1, 2]), path=path)
    assert "2/2" in capsys.readouterr().err
    run(irrational, grid(d=[1], seed=[1, 2, 3, 4]), path=path)
    shown = capsys.readouterr().err
    assert "50%" in shown and "4/4" in shown
    monkeypatch.setenv("LOWGRAD_BOOK", "1")
    run(irrational, grid(d=[1], seed=[1, 2, 3, 4, 5]), path=path)
    assert capsys.readouterr().err == ""


# --- processes ----------------------------------------------------------------------------------


def test_workers_do_not_change_a_bit_and_have_one_thread(path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # or one thread would be no merit
    cells = grid(d=[300, 200], seed=[0, 1])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        serial = quiet(product_of_matrices, cells)
        parallel = quiet(product_of_matrices, cells, workers=2, path=path)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    pd.testing.assert_frame_equal(
        serial.drop(columns="seconds"), parallel.drop(columns="seconds"), check_exact=True
    )
    assert parallel["threads"].tolist() == [1] * 4
    assert len(rows_in(path)) == 4


def test_a_dead_worker_costs_its_own_cell_only(path):
    cells = grid(x=range(6))
    with pytest.warns(UserWarning, match="1 of 6 cells failed"):
        table = quiet(deadly, cells, workers=2, path=path)
    assert table["error"].isna().tolist() == [True] * 3 + [False] + [True] * 2
    assert "the process died" in table["error"][3]
    assert table["y"].drop(3).tolist() == [x / 7 for x in (0, 1, 2, 4, 5)]
    assert sorted(row["parameters"]["x"] for row in rows_in(path)) == list(range(6))


SLOW = """
import time
from pathlib import Path

def slow(log, x):
    time.sleep(0.02)
    with open(log, "a") as file:
        file.write(f"{x}\\n")
    return {"y": x / 3}
"""

KILLED = """
import sys
sys.path.insert(0, sys.argv[1])
from slow_function import slow
from lowgrad_utils import sweeps
cells = sweeps.grid(log=[sys.argv[3]], x=range(120))
sweeps.run(slow, cells, path=sys.argv[2], workers=int(sys.argv[4]), progress=False)
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_sweep_loses_nothing_and_repeats_nothing(path, tmp_path, monkeypatch, workers):
    (tmp_path / "slow_function.py").write_text(SLOW)
    log = tmp_path / "calls"
    command = [sys.executable, "-c", KILLED, tmp_path, path, log, str(workers)]
    process = subprocess.Popen([str(word) for word in command], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_bytes().count(b"\n") > 5):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    # Workers of a killed run end by themselves; let those calls be counted before going on.
    time.sleep(0.5)
    before = path.read_bytes()
    kept = [json.loads(line)["parameters"]["x"] for line in before.splitlines()[1:]]
    assert 5 <= len(kept) < 120

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "slow_function", raising=False)
    from slow_function import slow

    table = quiet(slow, grid(log=[str(log)], x=range(120)), path=path)
    assert table["y"].tolist() == [x / 3 for x in range(120)]
    assert path.read_bytes().startswith(before)
    assert sorted(row["parameters"]["x"] for row in rows_in(path)) == list(range(120))
    calls = [int(word) for word in log.read_text().split()]
    assert all(calls.count(x) == 1 for x in kept)
    # Only what ran at the moment of the kill may have been called twice.
    assert len(calls) - 120 <= 3 * workers


# --- a Dask cluster -----------------------------------------------------------------------------


def unhurried(x):
    time.sleep(0.05)
    return {"y": x / 3, "process": os.getpid()}


@pytest.fixture
def cluster():
    with LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=None) as cluster:
        yield cluster


def test_a_worker_killed_in_the_middle_costs_no_row(path, cluster):
    """Two workers of two threads, one of them killed while it computes."""
    killed = []

    def kill_one():
        while not (path.exists() and path.read_bytes().count(b"\n") > 5):
            time.sleep(0.01)
        killed.append(rows_in(path)[0]["measured"]["process"])
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    table = quiet(unhurried, grid(x=range(80)), path=path, cluster=cluster)
    killer.join()
    assert table["error"].isna().all()
    assert table["y"].tolist() == [x / 3 for x in range(80)]
    assert sorted(row["parameters"]["x"] for row in rows_in(path)) == list(range(80))
    processes = table["process"].tolist()
    assert killed[0] in processes
    assert processes[-1] != killed[0]
    assert len(set(processes)) >= 2


def test_a_cluster_does_not_change_a_bit_and_goes_on_from_a_file(path, cluster, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cells = grid(d=[300, 200], seed=[0, 1, 2])
    here = quiet(product_of_matrices, cells)
    quiet(product_of_matrices, cells[:2], path=path)
    with Client(cluster, set_as_default=False) as client:
        there = quiet(product_of_matrices, cells, path=path, cluster=client)
        assert client.status == "running"  # a client that was handed over is not closed
    pd.testing.assert_frame_equal(
        here.drop(columns="seconds"), there.drop(columns="seconds"), check_exact=True
    )
    by_address = quiet(product_of_matrices, cells[:3], cluster=cluster.scheduler_address)
    assert by_address["norm"].tolist() == here["norm"][:3].tolist()


def test_errors_and_deadly_cells_are_rows_on_a_cluster_too(cluster):
    with Client(cluster, set_as_default=False) as client:
        client.run_on_scheduler(_give_up_at_once)
        with pytest.warns(UserWarning, match="1 of 6 cells failed"):
            table = quiet(deadly, grid(x=range(6)), cluster=client)
        with pytest.warns(UserWarning, match="1 of 2 cells failed"):
            divided = quiet(lambda x: {"y": 1 / x}, grid(x=[0, 1]), cluster=client)
    assert "the process died" in table["error"][3]
    assert table["y"].drop(3).tolist() == [x / 7 for x in (0, 1, 2, 4, 5)]
    assert divided["error"].tolist() == ["ZeroDivisionError: division by zero", None]


def _give_up_at_once(dask_scheduler):
    """Suspect a cell at the first death, so that its neighbours on the worker are suspects too."""
    dask_scheduler.allowed_failures = 0


def test_a_cluster_that_is_not_there_is_named(path):
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "1s"}),
        pytest.raises(SweepError, match=r"cluster 'tcp://127\.0\.0\.1:9' cannot be reached"),
    ):
        quiet(unhurried, grid(x=[1]), cluster="tcp://127.0.0.1:9")
    with pytest.raises(SweepError, match="cluster 3 cannot be reached"):
        quiet(unhurried, grid(x=[1]), cluster=3)
    # What is finished needs no cluster.
    quiet(unhurried, grid(x=[1]), path=path)
    assert quiet(unhurried, grid(x=[1]), path=path, cluster=3)["y"].tolist() == [1 / 3]


def test_without_dask_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ModuleNotFoundError, match="pip install distributed"):
        quiet(unhurried, grid(x=[1]), cluster="tcp://127.0.0.1:9")


# --- stored grids -------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path):
    frame = quiet(irrational, grid(d=[1, 2, 3], seed=range(5)))
    frame["word"] = ["nan", "", "a,b", '"', "é"] * 3
    path = tmp_path / "grids" / "small.csv"
    sweeps.save_grid(frame, path, {"command": "make grid", "versions": {"numpy": "2"}})
    return frame, path


def test_a_stored_grid_comes_back_exactly(stored):
    frame, path = stored
    loaded = sweeps.load_grid(path)
    assert loaded.attrs["provenance"] == {"command": "make grid", "versions": {"numpy": "2"}}
    for name in frame.columns.drop("error"):
        assert loaded[name].dtype.kind == frame[name].dtype.kind
        assert [repr(v) for v in loaded[name]] == [repr(v) for v in frame[name]]
    assert sorted(p.name for p in path.parent.iterdir()) == ["small.csv", "small.json"]


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        (
            "small.csv",
            lambda c: c.replace(b"1", b"2", 1),
            r"SHA-256 in small\.json: it was changed",
        ),
        ("small.csv", lambda c: c[:-30], "SHA-256"),
        ("small.json", lambda c: c[:50], "small.json is damaged"),
        ("small.json", lambda c: b"{}", "small.json is damaged"),
        ("small.json", None, "small.json is missing"),
        ("small.csv", None, "small.csv is missing"),
    ],
)
def test_a_stored_grid_that_was_changed_is_refused(stored, name, damage, words):
    file = stored[1].parent / name
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(SweepError, match=words):
        sweeps.load_grid(stored[1])


def test_tables_that_cannot_be_stored(stored, tmp_path):
    frame = stored[0]
    for table, name, words in [
        (frame, "small.txt", "ending in .csv"),
        (frame.assign(error="bad"), "x.csv", "15 failed cells"),
        (frame.assign(word=[None, *["a"] * 14]), "x.csv", "column 'word' holds something else"),
        (frame.assign(d=pd.array([pd.NA, *[1] * 14], "Int64")), "x.csv", "column 'd'"),
    ]:
        with pytest.raises(ValueError, match=words):
            sweeps.save_grid(table, tmp_path / name, {})
    assert not (tmp_path / "x.csv").exists()


def test_spot_check_recomputes_distinct_random_cells(stored):
    loaded = sweeps.load_grid(stored[1]).drop(columns="word")
    calls = []

    def measure(d, seed):
        calls.append((d, seed))
        return {name: value for name, value in irrational(d, seed).items() if name != "word"}

    def check(cells, seed):
        return sweeps.spot_check(
            loaded, measure, cells=cells, seed=seed, rtol=0.0, parameters=["d", "seed"]
        )

    table = check(4, 0)
    assert len(set(calls)) == 4 and len(table) == 4 * 4
    assert set(table["quantity"]) == {"value", "count", "large", "no"}
    assert all(type(value) is int for call in calls for value in call)
    first = list(calls)
    check(4, 1)
    assert calls[4:] != first
    with pytest.raises(ValueError, match="cells is 16, but stored has 15"):
        check(16, 0)


def test_spot_check_names_the_cells_that_differ(stored):
    loaded = sweeps.load_grid(stored[1])[["d", "seed", "value"]]

    def measure(d, seed):
        return {"value": irrational(d, seed)["value"] * (1 + 1e-6 * (d == 2))}

    def check(rtol, function=measure, parameters=("d", "seed")):
        return sweeps.spot_check(
            loaded, function, cells=15, seed=0, rtol=rtol, parameters=list(parameters)
        )

    assert check(1.1e-6)["difference"].max() == pytest.approx(1e-6, rel=1e-3)
    with pytest.raises(SweepError, match=r"5 of 15 .*'d': 2.*value stored .*, recomputed ") as bad:
        check(0.9e-6)
    assert "'d': 1" not in str(bad.value)
    with pytest.raises(SweepError, match="5 of 15"):
        check(1.0, lambda d, seed: {"value": np.nan if d == 3 else measure(d, seed)["value"]})
    with pytest.raises(SweepError, match=r"measures \['other'\], but \['value'\] are stored"):
        check(1.0, lambda d, seed: {"other": 1})
    with pytest.raises(ValueError, match=r"parameters has \['n'\]"):
        check(1.0, parameters=("n",))


def test_spot_check_lets_rounding_pass_and_nothing_larger():
    stored = pd.DataFrame({"x": [1.0], "y": [3e-17]})
    check = functools.partial(
        sweeps.spot_check, stored, cells=1, seed=0, rtol=1e-6, parameters=["x"]
    )
    assert len(check(lambda x: {"y": -5e-17}, atol=1e-12)) == 1
    with pytest.raises(sweeps.SweepError, match="y"):
        check(lambda x: {"y": -5e-17})
    with pytest.raises(sweeps.SweepError, match="y"):
        check(lambda x: {"y": 2e-12}, atol=1e-12)

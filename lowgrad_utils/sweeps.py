"""Grids over sizes and seeds: run with a progress bar, resumed after any interruption, stored."""

import ast
import hashlib
import inspect
import json
import math
import os
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from joblib import Parallel, delayed, parallel_config
from joblib.externals.loky.process_executor import TerminatedWorkerError
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from lowgrad_utils import checks, files

try:
    import fcntl
except ImportError:  # Windows has no advisory locks; there nothing stops two runs on one file
    fcntl = None

Cell = dict[str, Any]
Row = dict[str, Any]

_RESERVED = ("seconds", "error")
_DIED = "the process died: killed, out of memory, or ended by the function"


class SweepError(ValueError):
    """A file of rows, or a stored grid, that is damaged or belongs to something else."""


def grid(**lists: Iterable[Any]) -> list[Cell]:
    """Return all combinations of the given lists, one dictionary each, the last varying fastest.

    Args:
        **lists: For each parameter the values it takes.

    Raises:
        TypeError: If a parameter is given a single value instead of a list.

    Example:
        >>> grid(d=[250, 500], seed=range(2))[1]
        {'d': 250, 'seed': 1}
    """
    for name, values in lists.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise TypeError(f"{name} is {values!r}, but a list of values is needed, [{values!r}]")
    return [dict(zip(lists, row)) for row in product(*lists.values())]


def run(
    function: Callable[..., Mapping[str, Any]],
    grid: Sequence[Mapping[str, Any]],
    *,
    path: str | Path | None = None,
    workers: int = 1,
    cluster: Any = None,
    progress: bool = True,
    retry_failures: bool = False,
) -> pd.DataFrame:
    """Call ``function`` on every cell of a grid and return one row a cell, in the grid's order.

    With ``path`` each row is on the disk (JSON lines, flushed and synced) before the next one is
    waited for. A later run with the same path takes up where the last one ended, however it
    ended: rows that are there are not computed again, a torn last line is dropped. The file
    remembers the function's name and code (without comments) and the names of the parameters,
    and is refused to another function; a grid may grow or shrink between runs.

    Every cell runs on one thread, in this process or in a worker, so that results do not depend
    on ``workers`` or ``cluster``. A cell that raises becomes a row with its error, and the others
    go on. So does a cell whose worker dies (out of memory, say), after it was tried again.

    Args:
        function: Called as ``function(**cell)``; returns a dictionary of numbers, strings or
            truth values (numpy and torch scalars are converted). It draws its randomness from a
            seed among its parameters.
        grid: The cells, all with the same parameters: numbers, strings, truth values or None.
        path: File of rows to resume from and append to.
        workers: Number of processes on this machine; 1 computes in this one.
        cluster: A Dask cluster to compute on instead: a ``distributed`` Client or Cluster, or a
            scheduler's address. Its workers must be able to import what the function needs.
        progress: Show a bar with the time left (never while the book is built).
        retry_failures: Compute failed cells again, too.

    Returns:
        Columns: the parameters, what was measured, ``seconds`` (of processor time) and ``error``
        (None, or the text of the exception).

    Raises:
        TypeError: If a cell holds something else than plain values.
        ValueError: If cells are missing, repeated or differ in their parameters.
        SweepError: If the file belongs to another function, is damaged, or in use; or if the
            cluster cannot be reached or is lost (finished rows are kept).
        ModuleNotFoundError: If ``cluster`` is given and Dask's ``distributed`` is not installed.

    Example:
        >>> def power(d, seed):
        ...     return {"value": d**-0.5 * (1 + 0.01 * seed)}
        >>> run(power, grid(d=[100, 400], seed=[0, 1]), progress=False)["value"].tolist()
        [0.1, 0.101, 0.05, 0.0505]
    """
    workers = checks.positive_integer("workers", workers)
    cells = _checked(grid)
    with _Journal(path, function, list(cells[0])) as journal:
        keys = [_key(cell) for cell in cells]
        rows = journal.rows
        todo = [
            cell
            for key, cell in zip(keys, cells)
            if key not in rows or (retry_failures and rows[key]["error"] is not None)
        ]
        quiet = not progress or os.environ.get("LOWGRAD_BOOK") == "1"
        with tqdm(total=len(cells), initial=len(cells) - len(todo), disable=quiet) as bar:
            for row in _finished(function, todo, workers, cluster):
                journal.append(row)
                bar.update()
    results = [rows[key] for key in keys]
    failed = sum(row["error"] is not None for row in results)
    if failed:
        warnings.warn(
            f"{failed} of {len(results)} cells failed, see the column error; once the cause is "
            "mended, run again with retry_failures=True",
            stacklevel=2,
        )
    return _frame(results)


def spot_check(
    stored: pd.DataFrame,
    function: Callable[..., Mapping[str, Any]],
    *,
    cells: int,
    seed: int,
    rtol: float,
    parameters: Sequence[str],
    atol: float = 0.0,
) -> pd.DataFrame:
    """Recompute a random handful of stored cells and compare every measurement.

    Args:
        stored: A table of ``run`` or ``load_grid``.
        function: The function that measured it.
        cells: Number of cells to recompute.
        seed: Seed of their choice.
        rtol: Largest relative difference |recomputed - stored| / |stored| allowed in numbers;
            other values must be equal, and NaN agrees with NaN.
        parameters: The columns that are parameters; all others but ``seconds`` and ``error``
            are measurements.
        atol: Absolute difference below which numbers agree whatever their ratio, for
            measurements that are zero but for rounding.

    Returns:
        One row for each cell and measurement: the parameters, ``quantity``, ``stored``,
        ``recomputed``, ``difference``.

    Raises:
        SweepError: If a measurement differs, naming the cells; or if what the function returns
            are not the stored columns.
        ValueError: If there are fewer cells than asked for, or a parameter is not a column.

    Example:
        >>> def square(x):
        ...     return {"y": x**2}
        >>> table = run(square, grid(x=[1.0, 2.0, 3.0]), progress=False)
        >>> len(spot_check(table, square, cells=2, seed=0, rtol=1e-12, parameters=["x"]))
        2
    """
    parameters = list(parameters)
    absent = [name for name in parameters if name not in stored.columns]
    if absent:
        raise ValueError(f"parameters has {absent}, but stored has columns {list(stored.columns)}")
    if checks.positive_integer("cells", cells) > len(stored):
        raise ValueError(f"cells is {cells}, but stored has {len(stored)} rows")
    names = [name for name in stored.columns if name not in (*parameters, *_RESERVED)]
    compared = []
    for place in np.random.default_rng(seed).choice(len(stored), size=cells, replace=False):
        row = {name: _plain(stored[name].iloc[place]) for name in (*parameters, *names)}
        cell = {name: row[name] for name in parameters}
        with _one_thread():
            measured = _measurements(function(**cell), cell)
        if set(measured) != set(names):
            raise SweepError(
                f"{_name(function)} measures {sorted(measured)}, but {sorted(names)} are stored"
            )
        compared += [
            {
                **cell,
                "quantity": name,
                "stored": row[name],
                "recomputed": measured[name],
                "difference": _difference(row[name], measured[name], atol),
            }
            for name in names
        ]
    table = pd.DataFrame(compared)
    off = table[table["difference"] > rtol]
    if len(off):
        shown = "; ".join(
            f"{ {name: row[name] for name in parameters} }: {row['quantity']} stored "
            f"{row['stored']!r}, recomputed {row['recomputed']!r}"
            for row in off.head(5).to_dict("records")
        )
        raise SweepError(
            f"{len(off)} of {len(table)} recomputed measurements differ by more than "
            f"{rtol:g}: {shown}"
        )
    return table


def save_grid(frame: pd.DataFrame, path: str | Path, provenance: Mapping[str, Any]) -> None:
    """Store a table as CSV with exact floats, and beside it a JSON file that says where it is from.

    ``<name>.json`` holds the provenance, the SHA-256 of ``<name>.csv``, and the columns' types.

    Args:
        frame: A table of numbers, truth values and strings, with no failed cells.
        path: Where the CSV goes, ending in ``.csv``.
        provenance: What made it: command, versions, date, as plain values.

    Raises:
        ValueError: If the name does not end in ``.csv``, a cell failed, or a column holds
            something else.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "small.csv"
        >>> save_grid(pd.DataFrame({"d": [250], "value": [0.1]}), path, {"command": "by hand"})
        >>> load_grid(path).attrs["provenance"]
        {'command': 'by hand'}
    """
    path = Path(path)
    if path.suffix != ".csv":
        raise ValueError(f"path is {path.name!r}, but a name ending in .csv is needed")
    if "error" in frame and frame["error"].notna().any():
        raise ValueError(
            f"frame has {frame['error'].notna().sum()} failed cells; run them again with "
            "retry_failures=True before storing"
        )
    frame = frame.drop(columns="error", errors="ignore")
    columns = {name: _kind(frame[name]) for name in frame.columns}
    frame = frame.astype({name: float for name, kind in columns.items() if kind == "float"})
    # pandas writes the shortest decimals that read back as the same float64.
    content = frame.to_csv(index=False, na_rep="nan", lineterminator="\n").encode()
    about = {
        "provenance": dict(provenance),
        "sha256": hashlib.sha256(content).hexdigest(),
        "rows": len(frame),
        "columns": columns,
    }
    text = json.dumps(about, indent=2, ensure_ascii=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(path, content)
    files.write_whole(path.with_suffix(".json"), text.encode())


def load_grid(path: str | Path) -> pd.DataFrame:
    """Load a table of ``save_grid`` after checking its SHA-256.

    Args:
        path: The CSV file; its JSON file must lie beside it.

    Returns:
        The table as it was saved, its provenance in ``attrs["provenance"]``.

    Raises:
        SweepError: If a file is missing, or the CSV is not the one that the JSON file describes.
    """
    path = Path(path)
    beside = path.with_suffix(".json")
    for needed in (path, beside):
        if not needed.is_file():
            raise SweepError(f"{needed} is missing; restore it, or compute the grid again")
    content = path.read_bytes()
    try:
        about = json.loads(beside.read_text(encoding="utf-8"))
        recorded, columns = about["sha256"], about["columns"]
    except (ValueError, KeyError, TypeError) as error:
        raise SweepError(f"{beside} is damaged ({error!r}); restore it") from error
    if hashlib.sha256(content).hexdigest() != recorded:
        raise SweepError(
            f"{path} does not have the SHA-256 in {beside.name}: it was changed after it was "
            "computed; restore it, or compute the grid again"
        )
    # Text first: pandas would guess types, and read a string "nan" as a missing one.
    text = pd.read_csv(path, dtype=str, keep_default_na=False)
    convert = {"float": float, "int": int, "bool": lambda word: word == "True", "str": str}
    frame = pd.DataFrame(
        {name: [convert[kind](word) for word in text[name]] for name, kind in columns.items()}
    )
    frame.attrs["provenance"] = about["provenance"]
    return frame


# --- computing cells ----------------------------------------------------------------------------


def _finished(function: Callable, cells: list[Cell], workers: int, cluster: Any) -> Iterator[Row]:
    """Yield the rows of the cells as they are finished, wherever they are computed."""
    if cluster is not None:
        # With nothing left to do the cluster need not be there.
        return _dask(function, cells, cluster) if cells else iter(())
    return _serial(function, cells) if workers == 1 else _loky(function, cells, workers)


def _serial(function: Callable, cells: list[Cell]) -> Iterator[Row]:
    """Yield the rows of the cells, computed in this process."""
    for cell in cells:
        with _one_thread():
            row = _compute(function, cell)
        yield row


def _loky(function: Callable, cells: list[Cell], workers: int) -> Iterator[Row]:
    """Yield the rows of the cells as worker processes finish them.

    When a worker dies, the pool dies with it and nobody knows which cell was at fault. The first
    unfinished one is then tried alone, and a new pool takes the rest: each round finishes at least
    one cell, and only cells that kill a worker of their own count as failed.
    """
    left = {_key(cell): cell for cell in cells}
    while left:
        try:
            for row in _pool(function, list(left.values()), workers):
                del left[_key(row["parameters"])]
                yield row
        except TerminatedWorkerError:
            key, cell = next(iter(left.items()))
            del left[key]
            yield _alone(function, cell)


def _alone(function: Callable, cell: Cell) -> Row:
    begin = time.perf_counter()
    try:
        return next(_pool(function, [cell], 1))
    except TerminatedWorkerError:
        return _row(cell, {}, time.perf_counter() - begin, _DIED)


def _pool(function: Callable, cells: list[Cell], workers: int) -> Iterator[Row]:
    # Threads are limited by variables that the libraries read when a worker imports them.
    # joblib runs a pool of one in this process, which a dying cell would take along: hence the
    # second, idle worker.
    with parallel_config("loky", n_jobs=max(workers, 2), inner_max_num_threads=1):
        parallel = Parallel(return_as="generator_unordered", batch_size=1)
        yield from parallel(delayed(_compute)(function, cell) for cell in cells)


def _dask(function: Callable, cells: list[Cell], cluster: Any) -> Iterator[Row]:
    """Yield the rows of the cells as a Dask cluster finishes them.

    The cells of a worker that dies go to the others; the scheduler gives up a cell under which
    several workers died (``distributed.scheduler.allowed-failures``). It may have been an innocent
    neighbour on the same workers, so it is tried once more when nothing else is running.
    """
    with _client(cluster) as client:
        suspects = []
        for cell, row in _on_cluster(function, cells, client):
            if row is None:
                suspects.append(cell)
            else:
                yield row
        for cell in suspects:
            begin = time.perf_counter()
            ((_, row),) = _on_cluster(function, [cell], client)
            yield row or _row(cell, {}, time.perf_counter() - begin, _DIED)


def _on_cluster(
    function: Callable, cells: list[Cell], client: Any
) -> Iterator[tuple[Cell, Row | None]]:
    """Yield each cell with its row, or with None if workers kept dying under it."""
    from distributed import KilledWorker, as_completed  # here, because Dask is an extra

    futures = {client.submit(_compute_there, function, cell, pure=False): cell for cell in cells}
    try:
        for future in as_completed(list(futures), loop=client.loop):
            cell = futures.pop(future)
            if future.status == "finished":
                yield cell, future.result()
            elif future.status != "error":
                raise SweepError(
                    f"the cluster was lost with {len(futures) + 1} cells to go; finished rows are "
                    "kept if path is given, run again to go on"
                )
            elif isinstance(error := future.exception(), KilledWorker):
                yield cell, None
            else:
                # Not raised by the function, whose errors are rows: it could not be loaded there.
                yield cell, _row(cell, {}, 0.0, f"{type(error).__name__}: {error}")
    finally:
        client.cancel(list(futures))


@contextmanager
def _client(cluster: Any) -> Iterator[Any]:
    """Yield a client of the cluster; close it afterwards unless it was the caller's own."""
    try:
        from distributed import Client
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "cluster needs Dask, which is not installed: pip install distributed"
        ) from error
    if isinstance(cluster, Client):
        yield cluster
        return
    try:
        client = Client(cluster, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise SweepError(f"cluster {cluster!r} cannot be reached: {error}") from error
    with client:
        yield client


def _compute_there(function: Callable, cell: Cell) -> Row:
    """Compute a cell on a cluster's worker, which may run several at once in one process."""
    # Not undone afterwards: one cell's end would give the others their threads back.
    torch.set_num_threads(1)
    threadpool_limits(1)
    return _compute(function, cell)


def _compute(function: Callable, cell: Cell) -> Row:
    begin = time.thread_time()
    try:
        measured, error = _measurements(function(**cell), cell), None
    except Exception as caught:  # whatever a cell raises is its result; the other cells go on
        measured, error = {}, f"{type(caught).__name__}: {caught}"
    return _row(cell, measured, time.thread_time() - begin, error)


def _row(cell: Cell, measured: dict, seconds: float, error: str | None) -> Row:
    return {"parameters": cell, "measured": measured, "seconds": seconds, "error": error}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread, as workers do: sums split among threads differ in the last digits."""
    # torch has its own word, because not every build of it computes on a pool seen from outside.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


def _measurements(measured: Any, cell: Cell) -> dict[str, Any]:
    if not isinstance(measured, Mapping):
        raise TypeError(
            f"the function returned a {type(measured).__name__}, but a dictionary is needed"
        )
    taken = [name for name in measured if name in cell or name in _RESERVED]
    if taken:
        raise ValueError(f"measurements {taken} have the name of a parameter, seconds or error")
    plain = {str(name): _plain(value) for name, value in measured.items()}
    for name, value in plain.items():
        if not isinstance(value, int | float | str | None):
            raise TypeError(f"measurement {name} is a {type(value).__name__}, not a plain value")
    return plain


def _plain(value: Any) -> Any:
    """Return numpy and torch scalars as Python's own; anything else as it is."""
    if isinstance(value, np.generic) or (
        isinstance(value, np.ndarray | torch.Tensor) and value.ndim == 0
    ):
        return value.item()
    return value


# --- cells and tables ---------------------------------------------------------------------------


def _checked(grid: Sequence[Mapping[str, Any]]) -> list[Cell]:
    """Return the cells with plain values, all different and with the same parameters."""
    cells = [{name: _plain(value) for name, value in cell.items()} for cell in grid]
    if not cells or not cells[0]:
        raise ValueError("grid is empty, but at least one cell with a parameter is needed")
    for cell in cells:
        if cell.keys() != cells[0].keys():
            raise ValueError(
                f"grid has cells with parameters {sorted(cells[0])} and {sorted(cell)}, but all "
                "cells need the same"
            )
        for name, value in cell.items():
            if name in _RESERVED:
                raise ValueError(f"grid has a parameter {name!r}, a name kept for the results")
            if not isinstance(value, int | float | str | None):
                raise TypeError(
                    f"parameter {name} is a {type(value).__name__}, but a number, string, truth "
                    "value or None is needed"
                )
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"parameter {name} is {value}, but a finite number is needed")
    seen: set[str] = set()
    for cell in cells:
        if _key(cell) in seen:
            raise ValueError(f"grid has the cell {cell} twice")
        seen.add(_key(cell))
    return cells


def _key(cell: Cell) -> str:
    return json.dumps(cell, sort_keys=True)


def _frame(rows: list[Row]) -> pd.DataFrame:
    frame = pd.DataFrame([{**row["parameters"], **row["measured"]} for row in rows])
    frame["seconds"] = [row["seconds"] for row in rows]
    # As objects, since pandas would turn None into NaN in a column of strings.
    frame["error"] = pd.Series([row["error"] for row in rows], dtype=object)
    return frame


def _kind(column: pd.Series) -> str:
    """Return the type of a column in words that ``load_grid`` knows."""
    kinds = {"f": "float", "i": "int", "u": "int", "b": "bool"}
    # Only numpy's own types: those of pandas may have missing integers, which no CSV keeps apart.
    kind = kinds.get(column.dtype.kind) if isinstance(column.dtype, np.dtype) else None
    if kind is None and all(isinstance(value, str) for value in column):
        kind = "str"
    if kind is None:
        raise ValueError(
            f"column {column.name!r} holds something else than numbers, truth values or strings"
        )
    return kind


def _difference(stored: Any, recomputed: Any, atol: float) -> float:
    """Return the relative difference of two numbers, 0 if they are within ``atol``.

    Of other values 0 if equal, else infinity.
    """
    numbers = [isinstance(v, int | float) and not isinstance(v, bool) for v in (stored, recomputed)]
    if stored == recomputed or (all(numbers) and math.isnan(stored) and math.isnan(recomputed)):
        return 0.0
    if not all(numbers) or not (math.isfinite(stored) and math.isfinite(recomputed)):
        return math.inf
    if abs(recomputed - stored) <= atol:
        return 0.0
    return math.inf if stored == 0 else abs(recomputed - stored) / abs(stored)


# --- the file of rows ---------------------------------------------------------------------------


class _Journal:
    """The rows known so far by cell, and the file they are appended to (if there is a path)."""

    def __init__(self, path: str | Path | None, function: Callable, parameters: list[str]):
        self.path = None if path is None else Path(path)
        self.header = {
            "sweep": _name(function),
            "code": _code(function),
            "parameters": sorted(parameters),
        }
        self.rows: dict[str, Row] = {}

    def __enter__(self) -> "_Journal":
        self.file = None
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "a+b")
            try:
                self._lock()
                self._read()
            except BaseException:
                self.file.close()
                raise
        return self

    def __exit__(self, *error: object) -> None:
        if self.file is not None:
            self.file.close()

    def append(self, row: Row) -> None:
        self.rows[_key(row["parameters"])] = row
        self._write(row)

    def _write(self, line: dict) -> None:
        if self.file is not None:
            # JSON keeps floats exactly (shortest repr); NaN and Infinity are Python's extension.
            self.file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            self.file.flush()
            os.fsync(self.file.fileno())

    def _lock(self) -> None:
        # The lock goes with the process, however it ends.
        if fcntl is not None:
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise SweepError(
                    f"{self.path} is in use by another run; wait for it, or choose another path"
                ) from error

    def _read(self) -> None:
        """Read header and rows; drop a torn last line; write the header of a new file."""
        self.file.seek(0)
        content = self.file.read()
        whole, torn = content[: content.rfind(b"\n") + 1], content[content.rfind(b"\n") + 1 :]
        if not whole and not json.dumps(self.header, ensure_ascii=False).encode().startswith(torn):
            raise SweepError(f"{self.path} is not a file of rows; choose another path")
        lines = whole.splitlines()
        if lines:
            self._check_header(lines[0])
            for number, line in enumerate(lines[1:], start=2):
                row = self._parse(number, line)
                self.rows[_key(row["parameters"])] = row
        if torn:
            self.file.truncate(len(whole))
        if not lines:
            self._write(self.header)

    def _check_header(self, line: bytes) -> None:
        try:
            header = json.loads(line)
            differing = [key for key in self.header if header[key] != self.header[key]]
        except (ValueError, KeyError, TypeError) as error:
            raise SweepError(f"{self.path} is not a file of rows; choose another path") from error
        reasons = {
            "sweep": f"holds rows of {header['sweep']}, not of {self.header['sweep']}",
            "code": f"was written by another version of {header['sweep']}",
            "parameters": f"has parameters {header['parameters']}, not {self.header['parameters']}",
        }
        if differing:
            raise SweepError(
                f"{self.path} {reasons[differing[0]]}; delete the file, or choose another path"
            )

    def _parse(self, number: int, line: bytes) -> Row:
        try:
            row = json.loads(line)
            return _row(row["parameters"], row["measured"], row["seconds"], row["error"])
        except (ValueError, KeyError, TypeError) as error:
            raise SweepError(
                f"{self.path}, line {number}, is damaged; delete that line to compute its cell "
                "again, or the file"
            ) from error


def _name(function: Callable) -> str:
    """Return the function's name, with the arguments that partials have set."""
    bound = ""
    while isinstance(function, partial):
        bound = f"{bound}{[*function.args, function.keywords]}"
        function = function.func
    return getattr(function, "__qualname__", type(function).__qualname__) + bound


def _code(function: Callable) -> str | None:
    """Return a hash of the function's code, without comments and layout; None if unknown.

    The functions it calls are not seen: after a change in one of those, choose a new path.
    """
    while isinstance(function, partial):
        function = function.func
    try:
        source = textwrap.dedent(inspect.getsource(function))
        source = ast.unparse(ast.parse(source))
    except (OSError, TypeError, SyntaxError):
        return None  # written in C, typed at a prompt, or a lambda inside a longer statement
    return hashlib.sha256(source.encode()).hexdigest()

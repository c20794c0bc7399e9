"""Execute the notebooks of the book, several at once, and keep what came out.

Results lie in `_build/.executed/<document>/<key>.ipynb`. The key covers the notebook's code, the
whole of `lowgrad_utils`, the data and the versions of all packages, so nothing stale is ever reused
and a second run repeats only what failed or changed. `fill_cache` then hands the results to the
cache that Sphinx reads.
"""

import atexit
import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import nbformat
import psutil
from book_sources import (
    BookError,
    data_folder,
    kernel_key,
    notebook_key,
    notebooks,
    page_source,
)
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from nbclient import NotebookClient
from nbclient.exceptions import CellTimeoutError, DeadKernelError

WORKERS = 2
CELL_TIMEOUT = 300
NOTEBOOK_BUDGET = 90
CELL_BUDGET = 20
# Results of older versions of a notebook that stay, for going back and forth between edits.
KEPT_RESULTS = 3
# A kernel is told its ports before it opens them; when another program is quicker, it dies unused.
START_ATTEMPTS = 3
# Threads of several kernels would fight over the same cores, and the number of threads
# decides the order of summation: one each keeps runs both fast and repeatable.
KERNEL_ENVIRONMENT = {
    "LOWGRAD_BOOK": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # A kernel named python3 in the home folder may belong to another interpreter.
    "JUPYTER_PREFER_ENV_PATH": "1",
    # The debugger is of no use here and warns about frozen modules.
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
}
RECORD_READS = Path(__file__).with_name("record_reads.py")
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True)
class Report:
    """How the execution of one notebook went.

    Attributes:
        document: The document's name in `_toc.yml`.
        seconds: Wall time, the kernel's start included.
        slowest_cell: Number of the cell that took longest, counting all cells from 1.
        slowest_seconds: How long it took.
        failure: Where and why it failed, ready to print; empty when it went well.
        data: The shipped data that it read, by their names below the data folder.
    """

    document: str
    seconds: float
    slowest_cell: int = 0
    slowest_seconds: float = 0.0
    failure: str = ""
    data: tuple[str, ...] = ()


class Progress:
    """Remembers which cell runs and how long each one took."""

    def __init__(self):
        self.index: int | None = None
        self.seconds: dict[int, float] = {}
        self._began = 0.0

    def begin(self, cell: dict, cell_index: int) -> None:
        """Note that a cell begins; nbclient calls it."""
        self.index = cell_index
        self._began = time.monotonic()

    def end(self, cell: dict, cell_index: int, execute_reply: dict) -> None:
        """Note how long a cell took; nbclient calls it."""
        self.seconds[cell_index] = time.monotonic() - self._began

    def slowest(self) -> tuple[int, float]:
        """Return number and seconds of the slowest cell."""
        if not self.seconds:
            return 0, 0.0
        index = max(self.seconds, key=self.seconds.__getitem__)
        return index + 1, self.seconds[index]


def result_path(root: Path, document: str, key: str) -> Path:
    """Return where the executed copy of a document lies."""
    return root / "_build" / ".executed" / document / f"{key}.ipynb"


def execute_book(
    root: Path,
    workers: int = WORKERS,
    cell_timeout: int = CELL_TIMEOUT,
    only: list[str] | None = None,
) -> dict[str, Path]:
    """Execute whatever has no result yet and return the result of every notebook.

    Args:
        root: The folder that holds `_toc.yml`.
        workers: How many notebooks run at once.
        cell_timeout: Seconds after which a cell counts as failed.
        only: Some of the documents that are notebooks; all by default.

    Returns:
        For each document its executed notebook, in reading order.

    Raises:
        BookError: At least one notebook failed; the message reports all of them.
    """
    common = kernel_key(root)
    results = {
        doc: result_path(root, doc, notebook_key(root, doc, common))
        for doc in notebooks(root)
        if only is None or doc in only
    }
    waiting = {doc: path for doc, path in results.items() if not path.is_file()}
    kept = len(results) - len(waiting)
    print(f"Notebooks: {kept} of {len(results)} are up to date, {len(waiting)} to execute", end="")
    print(f" ({workers} at once)" if waiting else "", flush=True)
    start = time.monotonic()
    reports = _run_pool(root, waiting, workers, cell_timeout) if waiting else []
    failures = [report.failure for report in reports if report.failure]
    if failures:
        rule = "\n" + "=" * 80 + "\n"
        raise BookError(
            rule
            + rule.join(failures)
            + rule
            + f"{len(failures)} of {len(results)} notebooks failed; what is finished is kept"
        )
    if waiting:
        print(f"Executed {len(waiting)} notebooks in {time.monotonic() - start:.0f} s")
    for path in results.values():
        _drop_old_results(path)
    _print_durations(results)
    return results


def _run_pool(
    root: Path, waiting: dict[str, Path], workers: int, cell_timeout: int
) -> list[Report]:
    reports = []
    # Fresh processes: a fork would carry this one's open files and locks along.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures: dict[Future, str] = {
            pool.submit(execute_one, root, doc, path, cell_timeout): doc
            for doc, path in waiting.items()
        }
        try:
            for future in as_completed(futures):
                report = _report_of(future, futures[future])
                reports.append(report)
                state = "failed" if report.failure else "done"
                print(
                    f"  [{len(reports)}/{len(waiting)}] {report.document}: {state} after "
                    f"{report.seconds:.1f} s",
                    flush=True,
                )
        except BaseException:
            _end_children()
            raise
    return reports


def _end_children() -> None:
    """End the workers and their kernels, which lead groups of their own and hear no Ctrl-C."""
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def _report_of(future: Future, document: str) -> Report:
    try:
        return future.result()
    except BrokenProcessPool:
        why = "the process that ran it was killed (out of memory?)"
        return Report(document, 0.0, failure=f"{document}: {why}")


def execute_one(root: Path, document: str, target: Path, cell_timeout: int) -> Report:
    """Execute one notebook in a kernel of its own and write the result in one step.

    Args:
        root: The folder that holds `_toc.yml`.
        document: The document's name in `_toc.yml`.
        target: Where the executed notebook goes.
        cell_timeout: Seconds after which a cell counts as failed.

    Returns:
        How it went; a failure is reported, never raised.
    """
    start = time.monotonic()
    for attempt in range(1, START_ATTEMPTS + 1):
        progress = Progress()
        notebook = nbformat.read(page_source(root, document), as_version=4)
        try:
            data = run(notebook, page_source(root, document).parent, cell_timeout, progress)
            break
        except Exception as error:  # Whatever stops one notebook must not hide others' failures.
            never_began = isinstance(error, RuntimeError) and progress.index is None
            if never_began and attempt < START_ATTEMPTS:
                continue
            why = describe_failure(document, notebook, progress.index, error)
            return Report(document, time.monotonic() - start, failure=why)
    report = Report(document, time.monotonic() - start, *progress.slowest(), data=data)
    notebook.metadata["lowgrad_execution"] = asdict(report)
    _write_atomically(target, nbformat.writes(notebook))
    return report


def run(
    notebook: nbformat.NotebookNode,
    folder: Path,
    cell_timeout: int = CELL_TIMEOUT,
    progress: Progress | None = None,
) -> tuple[str, ...]:
    """Execute a notebook in a kernel of its own; outputs go into the notebook.

    Args:
        notebook: The notebook.
        folder: Where its kernel works.
        cell_timeout: Seconds after which a cell counts as failed.
        progress: Told of each cell.

    Returns:
        The shipped data that it read, by their names below the data folder.
    """
    progress = progress or Progress()
    with tempfile.TemporaryDirectory() as beside:
        reads = Path(beside, "reads")
        client = _client(notebook, folder, cell_timeout, progress)
        recording = {"LOWGRAD_DATA": str(data_folder()), "LOWGRAD_READS": str(reads)}
        try:
            client.execute(env={**os.environ, **KERNEL_ENVIRONMENT, **recording})
        except RuntimeError:
            # A kernel that never answered is gone, yet nbclient wants to end it once more when
            # Python ends, and then prints an AssertionError that nobody can make sense of.
            atexit.unregister(client._cleanup_kernel)
            raise
        names = reads.read_text(encoding="utf8").splitlines() if reads.is_file() else []
    return tuple(sorted(set(names)))


def _client(
    notebook: nbformat.NotebookNode, folder: Path, cell_timeout: int, progress: Progress
) -> NotebookClient:
    # In a namespace of its own: the notebook's names stay what its cells make of them.
    record = f"exec(open({str(RECORD_READS)!r}, encoding='utf8').read(), {{}})"
    return NotebookClient(
        notebook,
        timeout=cell_timeout,
        record_timing=False,
        # Otherwise every print is a box of its own in the page.
        coalesce_streams=True,
        kernel_name=notebook.metadata.get("kernelspec", {}).get("name", "python3"),
        # Kernels are reached through this machine's loopback only, yet warn about it.
        extra_arguments=["--IPKernelApp.log_level=ERROR", f"--IPKernelApp.exec_lines={record}"],
        resources={"metadata": {"path": str(folder)}},
        on_cell_execute=progress.begin,
        on_cell_executed=progress.end,
    )


def describe_failure(
    document: str, notebook: nbformat.NotebookNode, index: int | None, error: Exception
) -> str:
    """Return where and why a notebook failed, ready to print.

    Args:
        document: Its name, without suffix.
        notebook: The notebook, with the outputs so far.
        index: The cell that failed, None if it was none.
        error: What was raised.
    """
    if index is None:
        return f"{document}.ipynb, before its first cell: {type(error).__name__}: {error}"
    cell = notebook.cells[index]
    trace = [
        "\n".join(output["traceback"]) or f"{output['ename']}: {output['evalue']}"
        for output in cell.get("outputs", [])
        if output["output_type"] == "error"
    ]
    reason = {
        CellTimeoutError: "the cell ran out of time",
        DeadKernelError: "the kernel died (out of memory, or killed)",
    }.get(type(error), "")
    details = [reason, *trace] if reason or trace else [f"{type(error).__name__}: {error}"]
    head = f"{document}.ipynb, cell {index + 1} of {len(notebook.cells)}:"
    body = "\n".join(part for part in details if part)
    return ANSI.sub("", f"{head}\n\n{_indented(cell['source'])}\n\n{body}")


def _indented(source: str) -> str:
    return "\n".join(f"    {line}" for line in source.splitlines())


def _write_atomically(target: Path, text: str) -> None:
    # A kill while writing must not leave half a notebook that a later run takes for good.
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(f".{os.getpid()}.part")
    part.write_text(text, encoding="utf8")
    part.replace(target)


def _drop_old_results(current: Path) -> None:
    os.utime(current)
    newest = sorted(current.parent.glob("*.ipynb"), key=lambda p: p.stat().st_mtime, reverse=True)
    for path in [*newest[KEPT_RESULTS:], *current.parent.glob("*.part")]:
        path.unlink()


def execution_report(result: Path) -> Report:
    """Return the report stored inside an executed notebook."""
    metadata = json.loads(result.read_text(encoding="utf8"))["metadata"]
    return Report(**metadata["lowgrad_execution"])


def _print_durations(results: dict[str, Path]) -> None:
    print(f"  {'notebook':<32}{'seconds':>9}{'slowest cell':>22}")
    for path in results.values():
        report = execution_report(path)
        slowest = f"{report.slowest_seconds:.1f} s (cell {report.slowest_cell})"
        print(f"  {report.document:<32}{report.seconds:>9.1f}{slowest:>22}")
        if report.seconds > NOTEBOOK_BUDGET:
            print(f"  slow: over {NOTEBOOK_BUDGET} s; the results are complete")
        if report.slowest_seconds > CELL_BUDGET:
            print(f"  slow: a cell over {CELL_BUDGET} s; the results are complete")


def fill_cache(root: Path, results: dict[str, Path]) -> int:
    """Put the executed notebooks, and nothing else, into the cache that Sphinx reads.

    Args:
        root: The folder that holds `_toc.yml`.
        results: What `execute_book` returned.

    Returns:
        How many executed notebooks the cache holds now.
    """
    folder = root / "_build" / ".jupyter_cache"
    # Emptied first: the cache itself only compares cells, so it would bring back results from
    # before an edit to the package.
    shutil.rmtree(folder, ignore_errors=True)
    cache = get_cache(folder)
    for document, result in results.items():
        seconds = execution_report(result).seconds
        cache.cache_notebook_bundle(
            CacheBundleIn(
                nbformat.read(result, as_version=4),
                str(page_source(root, document)),
                data={"execution_seconds": seconds},
            ),
            check_validity=False,
            overwrite=True,
        )
    return cached_count(root)


def cached_count(root: Path) -> int:
    """Return how many executed notebooks the cache of Sphinx holds."""
    return len(get_cache(root / "_build" / ".jupyter_cache").list_cache_records())

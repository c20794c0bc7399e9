"""Which of the shipped data an assignment reads: noted while its solution and public tests run."""

import json
import sys
import tempfile
from pathlib import Path

import nbformat
import views
from sources import Assignment, SourceError

sys.path.append(str(views.ROOT / "tools"))

import book_sources
import execute


def data_read(assignment: Assignment, kept: Path) -> list[str]:
    """Return the names of the data that an assignment reads.

    Args:
        assignment: The assignment.
        kept: A folder for the answers, which stay while assignment, package and data do.

    Raises:
        SourceError: Its solution does not run to its end.
    """
    notebook = _runnable(assignment)
    key = book_sources.digest([], book_sources.kernel_key(views.ROOT), json.dumps(notebook))
    store = kept / f"{assignment.stem}.json"
    if store.is_file():
        stored = json.loads(store.read_text(encoding="utf8"))
        if stored["key"] == key:
            return stored["data"]
    print(f"{assignment.stem}: running its solution, to see what data it reads", flush=True)
    data = list(_run(assignment.stem, notebook))
    views.put(store, json.dumps({"key": key, "data": data}).encode("utf8"))
    return data


def _runnable(assignment: Assignment) -> dict:
    """Return the solved notebook with its public tests in place, which needs no otter."""
    notebook = views.notebook(assignment, solved=True)
    for cell in notebook["cells"]:
        kind, _, question = cell["id"].partition("-")
        if cell["id"] == "tests":
            cell["source"] = views.PUBLIC_HELPERS.read_text(encoding="utf8")
        elif kind == "public":
            name = views.name_of_answer(assignment, question)
            cell["source"] = "\n".join(
                f"def check({name}):\n{_indented(test.text)}\ncheck({name})"
                for test in assignment.of_kind("public", question)
            )
    return notebook


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" if line else "\n" for line in text.splitlines())


def _run(stem: str, notebook: dict, attempts: int = execute.START_ATTEMPTS) -> tuple[str, ...]:
    node, progress = nbformat.from_dict(notebook), execute.Progress()
    with tempfile.TemporaryDirectory() as folder:
        try:
            return execute.run(node, Path(folder), progress=progress)
        except Exception as error:
            # Of two kernels that start at once, one may find its ports taken, and die unused.
            never_began = isinstance(error, RuntimeError) and progress.index is None
            if not never_began or attempts == 1:
                why = execute.describe_failure(stem, node, progress.index, error).splitlines()
                raise SourceError(f"{why[0]} its solution does not run: {why[-1]}") from None
    return _run(stem, notebook, attempts - 1)

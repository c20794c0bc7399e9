"""What is made of a source: the student's notebook, the solution, the private archive."""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from sources import ASKED, GAP, Assignment, Cell

OTTER = "otter-grader==7.0.0"
ROOT = Path(__file__).resolve().parent.parent
SETUP_CELL = ROOT / "tools" / "setup_cell.py"
PUBLIC_HELPERS = Path(__file__).with_name("public_helpers.py")
RUBRIC = re.compile(r"^BEGIN RUBRIC\n(.*?)^END RUBRIC\n?", re.DOTALL | re.MULTILINE)
TODO = "...  # your code here"
WRITE_HERE = "_Write your answer here, in place of this line._"
FURTHER = """## Further questions

Here the assignment itself ends. The questions that follow are for those who want more. They have
points of their own, which are counted beside those of the core; nothing above needs them, and what
you leave open costs nothing. (Cells that need an open answer fail. That costs nothing either; if
your notebook stops at one, run those behind it one by one.)
"""
HAND_IN = """## Handing in

Run all cells once more from the top (*Runtime > Restart and run all* in Colab, *Kernel > Restart
and run all* in Jupyter), look at the result of each check, and hand in this one file
(*File > Download > .ipynb*). The checks here are examples; the grading uses others, on other data.
"""

TEST_SETUP = """# @title Setup: tests of this notebook. Run this first. {{ display-mode: "form" }}
import subprocess
import sys
from importlib import metadata
from pathlib import Path

OTTER = "{otter}"
HEAD = r'''{head}'''
TESTS = {tests}

try:
    found = "otter-grader==" + metadata.version("otter-grader")
except metadata.PackageNotFoundError:
    found = ""
if found != OTTER:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", OTTER], check=True)
folder = Path("tests", "{stem}")
folder.mkdir(parents=True, exist_ok=True)
for name, text in TESTS.items():
    text = f'OK_FORMAT = False\\nname = "{{name}}"\\npoints = 0\\n\\n' + HEAD + text
    (folder / (name + ".py")).write_text(text, encoding="utf8")

import otter

grader = otter.Notebook(tests_dir=str(folder))
print("Ready:", ", ".join(TESTS), "can be checked with grader.check")
"""


def notebook(assignment: Assignment, solved: bool, replaced: dict[str, str] | None = None) -> dict:
    """Make the notebook of an assignment.

    Args:
        assignment: The assignment.
        solved: Whether gaps, model answers and rubrics are filled in.
        replaced: Other code for the answers named, such as a typical wrong answer.

    Returns:
        The notebook as nested dictionaries, without outputs.
    """
    cells: list[dict] = []

    def add(kind: str, text: str, name: str, **metadata: Any) -> None:
        cell = {"cell_type": kind, "id": name, "metadata": metadata, "source": text.strip("\n")}
        outputs = {"execution_count": None, "outputs": []} if kind == "code" else {}
        cells.append({**cell, **outputs})

    for number, cell in enumerate(assignment.cells):
        name = f"{cell.kind}-{cell.name or number}"
        if cell.kind == "code":
            add("code", cell.text, name)
        elif cell.kind in ("markdown", "further"):
            head = f"{FURTHER}\n" if cell.kind == "further" else ""
            add("markdown", head + _asked(assignment, cell.text), name)
        elif cell.kind == "answer":
            text = (replaced or {}).get(cell.name) or (_filled(cell) if solved else stub(cell))
            add("code", text, name)
        elif cell.kind == "written":
            add("markdown", _written(cell, solved), name)
        elif cell.kind == "public" and name not in [each["id"] for each in cells]:
            add("code", f'grader.check("{cell.name}")', name)
        if len(cells) == 1 and cell.kind == "markdown":
            add("markdown", _points(assignment), "points")
            add("code", SETUP_CELL.read_text(encoding="utf8"), "setup", tags=["remove-cell"])
            add("code", _test_setup(assignment), "tests", cellView="form")
    add("markdown", HAND_IN, "handing-in")
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def stub(cell: Cell) -> str:
    """Return the code of an answer with its gap open, as students get it."""
    return GAP.sub(lambda gap: f"{gap['indent']}{TODO}\n", cell.text)


def _filled(cell: Cell) -> str:
    return GAP.sub(lambda gap: gap["inside"], cell.text)


def written_mark(name: str) -> str:
    """Return the first line of the cell of a written answer, by which it is found again."""
    return f"**Answer {name}"


def _written(cell: Cell, solved: bool) -> str:
    head = f"{written_mark(cell.name)} ({cell.points:g} points).**\n\n"
    if not solved:
        return head + WRITE_HERE
    return f"{head}{model_answer(cell)}\n\n**Rubric**\n\n{rubric(cell)}"


def model_answer(cell: Cell) -> str:
    """Return the model answer of a written question."""
    return GAP.search(cell.text)["inside"].strip()


def rubric(cell: Cell) -> str:
    """Return the rubric of a written question."""
    return RUBRIC.search(cell.text)[1].strip()


def _asked(assignment: Assignment, text: str) -> str:
    """Say beside each question what it is worth, how long it takes, and if it is a further one."""
    points = {**assignment.questions, **assignment.written}

    def head(question: re.Match) -> str:
        name = question[1]
        kind = "Further question" if name in assignment.further else "Question"
        worth, minutes = worded(points[name], "point"), assignment.minutes([name])
        return f"**{kind} {name}** ({worth}, {minutes} minutes)."

    return ASKED.sub(head, text)


def hours(minutes: int) -> str:
    """Return a time in hours, to the next half.

    Example:
        >>> hours(205), hours(230), hours(40)
        ('3½ hours', '4 hours', '½ hour')
    """
    halves = max(1, round(minutes / 30))
    text = ("" if halves == 1 else str(halves // 2)) + ("½" if halves % 2 else "")
    return f"{text} hour{'s' if halves > 2 else ''}"


def worded(count: float, word: str) -> str:
    """Return a number with its word in the singular or the plural.

    Example:
        >>> worded(1.0, "point"), worded(2.5, "point")
        ('1 point', '2.5 points')
    """
    return f"{count:g} {word}{'' if count == 1 else 's'}"


def extent(assignment: Assignment, names: list[str]) -> str:
    """Return how long some of the questions take, and what they are worth, in a few words.

    Args:
        assignment: The assignment.
        names: The questions and written answers, such as those of its core.
    """
    parts = []
    for word, group in (("question", assignment.questions), ("answer", assignment.written)):
        points = [group[name] for name in names if name in group]
        parts += [worded(len(points), word), worded(sum(points), "point")] if points else []
    return f"{hours(assignment.minutes(names))}: {', '.join(parts)}" if parts else "none"


def _points(assignment: Assignment) -> str:
    parts = [
        "**Points and time.** Questions q are code, graded by tests; answers w are a few sentences "
        "of yours. Fill the gaps marked `...  # your code here`, keep names and arguments of the "
        "functions, and keep the first line of each answer's cell.",
        _table(assignment, "The assignment", assignment.core),
    ]
    if assignment.further:
        title = "Further questions, at the end, for those who want more"
        parts.append(_table(assignment, title, assignment.further))
    return "\n\n".join(parts)


def _table(assignment: Assignment, title: str, names: list[str]) -> str:
    points = {**assignment.questions, **assignment.written}
    total, time = sum(points[name] for name in names), hours(assignment.minutes(names))
    return (
        f"{title}: {worded(total, 'point')}, about {time} once you have read the chapters.\n\n"
        f"| | {' | '.join(names)} |\n|---|{'---|' * len(names)}\n"
        f"| points | {' | '.join(f'{points[name]:g}' for name in names)} |\n"
        f"| minutes | {' | '.join(str(assignment.minutes([name])) for name in names)} |"
    )


def public_test(assignment: Assignment, name: str) -> str:
    """Return the public tests of one question, in otter's exception-based form, without head."""
    answer, functions = name_of_answer(assignment, name), []
    for number, cell in enumerate(assignment.of_kind("public", name), 1):
        body = "".join(f"    {line}\n" if line else "\n" for line in cell.text.splitlines())
        functions.append(f"\n\n@test_case(points=0)\ndef test_{number}({answer}):\n{body}")
    return "".join(functions)


def public_head() -> str:
    """Return what the public tests of every question start with, below its name."""
    helpers = PUBLIC_HELPERS.read_text(encoding="utf8").partition('"""\n\n')[2]
    return "from otter.test_files import test_case\n\n" + helpers


def name_of_answer(assignment: Assignment, question: str) -> str:
    """Return the name of the function that a question asks for."""
    (cell,) = assignment.of_kind("answer", question)
    return "".join(re.findall(r"^def (\w+)\(|^(\w+) =", cell.text, re.MULTILINE)[-1])


def _test_setup(assignment: Assignment) -> str:
    tests = {name: public_test(assignment, name) for name in assignment.questions}
    shown = "".join(f"    {name!r}: r'''{text}''',\n" for name, text in tests.items())
    return TEST_SETUP.format(
        otter=OTTER, head=public_head(), tests="{\n" + shown + "}", stem=assignment.stem
    )


def autograder(assignment: Assignment) -> dict[str, Any]:
    """Return what grading needs and no student may have, as plain values.

    Args:
        assignment: The assignment.
    """
    return {
        "stem": assignment.stem,
        "title": assignment.settings["title"],
        "withheld": assignment.settings.get("withheld", []),
        "questions": assignment.questions,
        "functions": {name: name_of_answer(assignment, name) for name in assignment.questions},
        "further": assignment.further,
        "written": {
            cell.name: {
                "points": cell.points,
                "model": model_answer(cell),
                "rubric": rubric(cell),
            }
            for cell in assignment.of_kind("written")
        },
        "common": "".join(cell.text for cell in assignment.of_kind("hidden", "common")),
        "hidden": [
            {"question": c.name, "title": c.title, "points": c.points, "code": c.text}
            for c in assignment.of_kind("hidden")
            if c.name != "common"
        ],
    }


def as_file(notebook_or_archive: dict[str, Any]) -> bytes:
    """Return the bytes of a notebook or of the private archive's list."""
    text = json.dumps(notebook_or_archive, indent=1, ensure_ascii=False) + "\n"
    return text.encode("utf8")


def put(path: Path, content: bytes) -> None:
    """Write a file aside and move it into place, so that nobody ever reads a part of it.

    Several processes may do so at once; the last one stays.

    Args:
        path: The file; its folder is made if it is missing.
        content: What it shall hold.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(content)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def digest(content: bytes) -> str:
    """Return a short digest that tells one version of a file from another."""
    # Never a number, not even 12e34: a spreadsheet would round it.
    return "sha-" + hashlib.sha256(content).hexdigest()[:16]

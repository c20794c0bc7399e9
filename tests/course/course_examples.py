"""Submissions made for the tests: answers alone, without the cells that only show something."""

import copy
from pathlib import Path

import views
from grade import Submission

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "assignments").glob("*.py"))
# Enough on a slow and shared machine for what the tests' submissions honestly do.
LIMITS = {"seconds": 90.0, "cell": 60.0, "call": 30.0, "memory": 400_000_000, "output": 4_000_000}


def answers_only(assignment, replaced=None, solved=True):
    """A notebook with the imports and the code of an assignment, nothing written, nothing shown."""
    notebook = views.notebook(assignment, solved=solved, replaced=replaced)
    stub = views.notebook(assignment, solved=False)
    cells = [
        theirs if theirs["id"].startswith("written-") else ours
        for ours, theirs in zip(notebook["cells"], stub["cells"])
    ]
    given = [cell["id"] for cell in cells if cell["id"].startswith("code-")]
    return {**notebook, "cells": [cell for cell in cells if cell["id"] not in given[1:]]}


def with_cell(notebook, source):
    """The notebook with one more code cell at its end."""
    notebook = copy.deepcopy(notebook)
    cell = {
        "cell_type": "code",
        "id": "extra",
        "metadata": {},
        "source": source,
        "outputs": [],
        "execution_count": None,
    }
    notebook["cells"].append(cell)
    return notebook


def submission(notebook, name="a student"):
    """The notebook as something handed in."""
    return Submission(name, views.as_file(notebook))

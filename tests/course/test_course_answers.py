"""Right answers earn all points, stubs none, and typical wrong answers lose what they should."""

import ast
import json

import pytest
import sources
import views
from course_examples import SOURCES, answers_only, submission, with_cell

WRONG = [
    pytest.param(path.stem, cell, id=f"{path.stem}-{cell.name}-{cell.title.replace(' ', '-')}")
    for path in SOURCES
    for cell in sources.read(path).of_kind("wrong")
]
RIGHT = [
    pytest.param(path.stem, cell, id=f"{path.stem}-{cell.name}-{cell.title.replace(' ', '-')}")
    for path in SOURCES
    for cell in sources.read(path).of_kind("right")
]
NAMES = [path.stem for path in SOURCES]


def _points(row, assignment):
    return {name: float(row[name]) for name in assignment.questions}


@pytest.mark.parametrize("name", NAMES)
def test_solution_earns_all_points(name, assignments, graders):
    assignment = assignments[name]
    # With its experiments: every given cell must run where submissions run.
    row = graders[name].grade(submission(views.notebook(assignment, solved=True)))
    assert row["message"] == ""
    assert row["status"] == "graded"
    assert _points(row, assignment) == assignment.questions


@pytest.mark.parametrize("name", NAMES)
def test_untouched_notebook_earns_nothing(name, assignments, graders):
    row = graders[name].grade(submission(views.notebook(assignments[name], solved=False)))
    assert set(_points(row, assignments[name]).values()) == {0.0}
    assert row["status"] == "graded"


@pytest.mark.parametrize(("name", "cell"), WRONG)
def test_wrong_answer_loses_its_points_and_no_others(name, cell, assignments, graders):
    assignment = assignments[name]
    row = graders[name].grade(submission(answers_only(assignment, {cell.name: cell.text})))
    expected = {**assignment.questions}
    expected[cell.name] -= cell.points
    assert _points(row, assignment) == expected, row["message"]
    assert cell.name in row["message"]


@pytest.mark.parametrize(("name", "cell"), RIGHT)
def test_other_right_answer_earns_all_points(name, cell, assignments, graders):
    notebook = with_cell(answers_only(assignments[name]), cell.text)
    row = graders[name].grade(submission(notebook))
    assert _points(row, assignments[name]) == assignments[name].questions, row["message"]


@pytest.mark.parametrize("name", NAMES)
def test_other_random_instances_say_the_same(name, assignments, graders):
    import grade

    assignment = assignments[name]
    for seed in (1, 2, 3):
        other = grade.Grader(views.autograder(assignment), seed=seed, limits=graders[name].limits)
        other.runners = graders[name].runners
        row = other.grade(submission(answers_only(assignment)))
        assert _points(row, assignment) == assignment.questions, (seed, row["message"])
        assert row["tests"] != graders[name].version


@pytest.mark.parametrize("name", NAMES)
def test_stub_and_solution_differ_only_at_the_gaps(name, assignments):
    assignment = assignments[name]
    stub = views.notebook(assignment, solved=False)
    solution = views.notebook(assignment, solved=True)
    assert {key: stub[key] for key in stub if key != "cells"} == {
        key: solution[key] for key in solution if key != "cells"
    }
    assert [cell["id"] for cell in stub["cells"]] == [cell["id"] for cell in solution["cells"]]
    for ours, theirs in zip(stub["cells"], solution["cells"]):
        kind = ours["id"].partition("-")[0]
        if kind not in ("answer", "written"):
            assert ours == theirs
            continue
        assert ours["source"].splitlines()[0] == theirs["source"].splitlines()[0]
        if kind == "answer":
            # What is left of the stub without its gap stands in the solution, in the same order.
            ours_kept = [line for line in ours["source"].splitlines() if views.TODO not in line]
            rest = iter(theirs["source"].splitlines())
            assert all(line in rest for line in ours_kept)
            assert ours["source"].count(views.TODO) == 1
            ast.parse(ours["source"])


@pytest.mark.parametrize("name", NAMES)
def test_students_get_nothing_hidden(name, assignments):
    assignment = assignments[name]
    given = views.as_file(views.notebook(assignment, solved=False)).decode()
    text = "\n".join(cell["source"] for cell in json.loads(given)["cells"])
    for word in ("SOLUTION", "RUBRIC", "hidden", "# %%", "def check(", "def calls("):
        assert word not in text
    secrets = [
        line.strip()
        for cell in assignment.cells
        if cell.kind in ("hidden", "wrong", "right")
        for line in cell.text.splitlines()
    ]
    secrets += [
        line.strip()
        for cell in assignment.of_kind("answer") + assignment.of_kind("written")
        for line in views.GAP.search(cell.text)["inside"].splitlines()
    ]
    open_text = "\n".join(
        c.text for c in assignment.cells if c.kind in ("markdown", "code", "public", "answer")
    )
    open_text = views.GAP.sub("", open_text)
    for line in secrets:
        # Short lines say nothing, and some lines stand in what is given as well.
        if len(line) > 30 and line not in open_text:
            assert line not in text, line


def test_total_and_table_of_points(assignments):
    for assignment in assignments.values():
        points = {**assignment.questions, **assignment.written}
        text = views.notebook(assignment, solved=False)["cells"][1]["source"]
        assert f"The assignment: {sum(points[n] for n in assignment.core):g} points" in text
        if assignment.further:
            beside = sum(points[name] for name in assignment.further)
            assert f"for those who want more: {beside:g} points" in text
        assert 6 <= len(assignment.questions) <= 8


WITH_MORE = [path.stem for path in SOURCES if sources.read(path).further]


def _core_alone(assignment):
    """The solution with its experiments, further gaps as they were handed out."""
    stubs = {
        cell.name: views.stub(cell)
        for cell in assignment.of_kind("answer")
        if cell.name in assignment.further
    }
    return views.notebook(assignment, solved=True, replaced=stubs), list(stubs)


@pytest.mark.parametrize("name", WITH_MORE)
def test_core_without_the_further_questions_earns_its_points(name, assignments, graders):
    assignment = assignments[name]
    notebook, opened = _core_alone(assignment)
    row = graders[name].grade(submission(notebook))
    full = {n: 0 if n in opened else points for n, points in assignment.questions.items()}
    assert _points(row, assignment) == full, row["message"]
    # No cell of the core failed, and nothing is said of cells that need what is open.
    assert row["message"] == f"left open: {', '.join(opened)}"
    # The core with a gap of its own is another matter.
    first = next(iter(assignment.questions))
    cell = next(c for c in notebook["cells"] if c["id"] == f"answer-{first}")
    cell["source"] = views.stub(assignment.of_kind("answer", first)[0])
    row = graders[name].grade(submission(notebook))
    assert float(row[first]) == 0
    assert f"left open: {first}, {', '.join(opened)}" in row["message"]


REVERSED = """
import types
import numpy as np
import torch

def turned(value):
    if isinstance(value, torch.Tensor):
        value = value.detach().numpy()
    if isinstance(value, np.ndarray) and value.ndim:
        return np.flip(np.flip(value).copy())
    if isinstance(value, dict):
        return {key: turned(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(turned(each) for each in value)
    return value

def with_turned(function, kept):
    # It calls the others as they were.
    alone = types.FunctionType(function.__code__, kept, function.__name__, function.__defaults__)
    return lambda *args, **kwargs: turned(alone(*args, **kwargs))

kept = dict(globals())
for name in NAMES:
    globals()[name] = with_turned(globals()[name], kept)
"""


@pytest.mark.parametrize("name", NAMES)
def test_reversed_arrays_are_right_answers(name, assignments, graders):
    functions = [views.name_of_answer(assignments[name], n) for n in assignments[name].questions]
    notebook = with_cell(answers_only(assignments[name]), f"NAMES = {functions}\n{REVERSED}")
    row = graders[name].grade(submission(notebook))
    assert _points(row, assignments[name]) == assignments[name].questions, row["message"]


def test_public_tests_take_reversed_arrays_where_arrays_may_be_returned(assignments):
    assignment, space = assignments["break-a-claim"], {"grader": None}
    exec(views.PUBLIC_HELPERS.read_text(encoding="utf8"), space)
    for cell in assignment.of_kind("code")[:1] + assignment.of_kind("answer"):
        exec(cell.text, space)
    functions = [views.name_of_answer(assignment, name) for name in assignment.questions]
    exec(f"NAMES = {functions}\n{REVERSED}", space)
    strides = [s for a in space["setup"](0.5, 16, 3).values() for s in getattr(a, "strides", ())]
    assert min(strides) < 0
    for cell in assignment.of_kind("public"):
        exec(cell.text, dict(space))

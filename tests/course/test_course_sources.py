"""A source that breaks the rules is refused with its line; what is made of it is well formed."""

import doctest
import json
import re

import confine
import grade
import hidden
import make
import nbformat
import numpy as np
import plain
import pytest
import runner
import sources
import torch
import views
import withheld
from course_examples import ROOT, SOURCES

PAGE = ROOT / "instructors.md"

GOOD = '''# %% assignment
# title = "Small"
# minutes = {q1 = 100, w1 = 20, w2 = 10}

# %% [markdown]
# # Small

# %%
import torch

# %% [markdown]
# **Question q1.** Write `f`. **Question w1.** Why?

# %% answer q1
def f(x):
    """Twice x."""
    # BEGIN SOLUTION
    return 2 * x
    # END SOLUTION

# %% public q1
assert f(1.0) == 2, "f(1) is 2"

# %% hidden q1 2: doubles
def calls(rng):
    return [call("f", x=3.0)]

def check(calls, answers):
    near(answers[0], 6.0)

# %% wrong q1 2: squares
def f(x):
    return x**2

# %% wrong q1 2: triples
def f(x):
    return 3 * x

# %% wrong q1 2: halves
def f(x):
    return x / 2

# %% [markdown] written w1 1.5
# BEGIN SOLUTION
# Because.
# END SOLUTION
# BEGIN RUBRIC
# - 1.5 points: a reason
# END RUBRIC

# %% [markdown] further
# More.

# %% [markdown]
# **Question w2.** Why not?

# %% [markdown] written w2 1
# BEGIN SOLUTION
# Nobody knows.
# END SOLUTION
# BEGIN RUBRIC
# - 1 point: so it is
# END RUBRIC
'''


def _read(tmp_path, text):
    path = tmp_path / "small.py"
    path.write_text(text)
    return sources.read(path)


def test_small_source_is_read(tmp_path):
    assignment = _read(tmp_path, GOOD)
    assert assignment.questions == {"q1": 2.0}
    assert assignment.written == {"w1": 1.5, "w2": 1.0}
    assert (assignment.core, assignment.further) == (["q1", "w1"], ["w2"])
    assert (assignment.minutes(assignment.core), assignment.minutes(["w2"])) == (120, 10)
    (cell,) = assignment.of_kind("written", "w1")
    assert views.model_answer(cell) == "Because."
    assert views.rubric(cell) == "- 1.5 points: a reason"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("# %% public q1", "# %% pubic q1", "line 21: unknown kind of cell"),
        ("# %% public q1", "# %% public q7", "line 21: there is no question 'q7'"),
        ("# %% hidden q1 2: doubles", "# %% hidden q1", "needs points and a title"),
        ("# %% wrong q1 2: halves", "# %% wrong q1 3: halves", "cannot lose 3 of 2 points"),
        ("# %% wrong q1 2: halves", "# %%", "needs at least 3"),
        ("# %% wrong q1 2: halves", "# %% right q1 2: halves", "needs a title, as in 'right q1"),
        ("    # END SOLUTION\n", "", "line 14: no gap"),
        ("# BEGIN RUBRIC\n", "", "no rubric"),
        ("# # Small", "Small", "line 5: a line of Markdown must start with '#'"),
        ("import torch", "# BEGIN SOLUTION", "line 8: this solution"),
        ("# minutes = {", "# minutes = 3 {", "line 1: "),
        ("# minutes = {", "# hours = {", "title and minutes"),
        ("{q1 = 100, w1 = 20, w2 = 10}", "180", "minutes must name each of q1, w1, w2"),
        ("w2 = 10", "w2 = 10, w3 = 5", "minutes must name each of q1, w1, w2"),
        ("w2 = 10", "w2 = 0", "whole numbers above 0"),
        ("q1 = 100", "q1 = 99", "core takes 119 minutes, but 120 to 240"),
        ("q1 = 100", "q1 = 221", "core takes 241 minutes"),
        (
            "**Question w2.**",
            "**Question w2**.",
            "say '**Question NAME.**' once for each, look at w2",
        ),
        ("**Question w2.**", "**Question w1.**", "once for each, look at w2"),
        (
            "# More.",
            "# More.\n\n# %% [markdown] further\n# Still more.",
            "the second cell 'further'",
        ),
        ("# %% [markdown] written w1", "# %% [markdown] written q1", "'q1' is used twice"),
        ("# %% [markdown] written w1 1.5", "# %% written w1 1.5", "unknown kind of cell"),
    ],
)
def test_broken_source_is_named(tmp_path, old, new, said):
    assert old in GOOD
    with pytest.raises(sources.SourceError) as failure:
        _read(tmp_path, GOOD.replace(old, new, 1))
    assert str(failure.value).startswith("small.py")
    assert said in str(failure.value)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_made_files_are_well_formed_and_the_same_twice(source, tmp_path):
    first = [path.read_bytes() for path in make.make(source, tmp_path / "a")]
    paths = make.make(source, tmp_path / "b")
    assert first == [path.read_bytes() for path in paths]
    student, solution, archive = paths
    for path in (student, solution):
        content = json.loads(path.read_text(encoding="utf8"))
        nbformat.validate(content)
        names = [cell["id"] for cell in content["cells"]]
        assert len(set(names)) == len(names)
    assert archive.suffix == ".zip"


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_markdown_reads_well_everywhere(source):
    from notebook_rules import markdown_problems

    for solved in (False, True):
        for cell in views.notebook(sources.read(source), solved)["cells"]:
            if cell["cell_type"] == "markdown":
                assert markdown_problems(cell["source"]) == [], cell["source"]


@pytest.mark.parametrize(
    "module", [confine, grade, hidden, make, plain, runner, sources, views, withheld]
)
def test_examples_in_docstrings(module):
    assert doctest.testmod(module).failed == 0


def test_plain_values_keep_their_kind():
    value = {"k": 3, "on": True, "x": 0.5, "name": "tanh", "A": np.arange(6.0).reshape(2, 3)}
    back = plain.decode(json.loads(json.dumps(plain.encode(value))))
    assert {key: type(each) for key, each in back.items()} == {k: type(v) for k, v in value.items()}
    assert back["k"] == 3 and back["on"] is True
    assert (back["A"] == value["A"]).all()
    tensor = torch.ones(2, requires_grad=True)
    assert (plain.decode(plain.encode([tensor, None]))[0] == 1).all()


@pytest.mark.parametrize(
    "value", [object(), 1j, np.zeros(3, complex), np.array(["a"]), [[[[[[1]]]]]], 10**400, range]
)
def test_other_values_are_refused_in_one_line(value):
    with pytest.raises(plain.NotPlain) as failure:
        plain.encode(value)
    assert "\n" not in str(failure.value)


def test_optional_calls_leave_it_to_the_check_what_is_missing():
    seen = []
    calls = [hidden.call("f", x=1.0), hidden.optional(hidden.call("g", x=1.0))]
    test = hidden.HiddenTest("q1", "title", 1, calls, lambda calls, answers: seen.append(answers))
    given, missing = {"value": plain.encode(2.5)}, {"problem": "NameError: g is not defined"}
    assert test.verdict([given, missing]) == ""
    assert seen == [[2.5, hidden.Missing("NameError: g is not defined")]]
    assert test.verdict([missing, given]) == "NameError: g is not defined"
    assert test.verdict([given, given]) == ""
    assert test.verdict([{"value": None}, given]) == "it returned nothing"
    assert test.verdict([{"value": {"list": 3}}, given]).startswith("it returned something")


def test_arrays_inside_a_dictionary_arrive_as_tensors():
    case = {"case": {"X": np.eye(2), "n": 2, "name": "tanh"}}
    arrived = runner._tensors(plain.decode(plain.encode(case)))["case"]
    assert torch.equal(arrived["X"], torch.eye(2).double())
    assert (arrived["n"], arrived["name"]) == (2, "tanh")


def test_arrays_beyond_reason_are_refused():
    with pytest.raises(plain.NotPlain, match="more than"):
        plain.encode(np.zeros(plain.LARGEST + 1))
    with pytest.raises(plain.NotPlain, match="make it an array"):
        plain.encode([0.0] * 2000)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "no number"),
        ("1", "no number"),
        ([1.0, [2.0]], "no number"),
        (np.ones(3), "shape"),
        (np.array([1.0, np.nan]), "NaN"),
        (np.array([1.0, 2.1]), "off by"),
    ],
)
def test_near_says_what_is_wrong(answer, said):
    hidden.near([1, 2.0], np.array([1.0, 2.0]))
    hidden.near(np.array([2.0]), 2)
    with pytest.raises(AssertionError, match=said):
        hidden.near(answer, np.array([1.0, 2.0]))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_page_for_instructors_lists_it(source):
    assignment = sources.read(source)
    rows = [line for line in PAGE.read_text().splitlines() if f"(`{source.stem}`)" in line]
    assert len(rows) == 1, f"the table of instructors.md needs one row that names `{source.stem}`"
    (row,) = rows
    assert row.startswith(f"| {assignment.settings['title']} ")
    parts = [views.extent(assignment, names) for names in (assignment.core, assignment.further)]
    assert row.endswith(f" | {' | '.join(parts)} |"), parts


def test_questions_say_what_they_are_worth_and_which_may_be_left(tmp_path):
    cells = views.notebook(_read(tmp_path, GOOD), solved=False)["cells"]
    texts = [cell["source"] for cell in cells if cell["cell_type"] == "markdown"]
    assert "**Question q1** (2 points, 100 minutes). Write `f`." in texts[2]
    assert "**Question w1** (1.5 points, 20 minutes)." in texts[2]
    heads = [text.splitlines()[0] for text in texts]
    further = heads.index("## Further questions")
    assert texts[further].endswith("More.")
    assert texts[further + 1] == "**Further question w2** (1 point, 10 minutes). Why not?"
    assert heads[-1] == "## Handing in"
    assert "The assignment: 3.5 points, about 2 hours once you have read the chapters." in texts[1]
    assert "| | q1 | w1 |\n|---|---|---|\n| points | 2 | 1.5 |\n| minutes | 100 | 20 |" in texts[1]
    assert "for those who want more: 1 point, about ½ hour once" in texts[1]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_core_takes_two_to_four_hours_and_comes_first(source):
    assignment = sources.read(source)
    minutes, names = assignment.settings["minutes"], assignment.core + assignment.further
    assert 120 <= sum(minutes[name] for name in assignment.core) <= 240
    assert list(minutes) == names == [*dict.fromkeys(names)]
    assert set(names) == set(assignment.questions) | set(assignment.written)
    cells = views.notebook(assignment, solved=False)["cells"]
    heads = [n for n, c in enumerate(cells) if c["source"].startswith("## Further questions")]
    assert len(heads) == bool(assignment.further)
    for number, cell in enumerate(cells):
        kind, _, name = cell["id"].partition("-")
        if kind in ("answer", "written"):
            assert (name in assignment.further) == bool(heads and number > heads[0])
    for name in names:
        kind = "Further question" if name in assignment.further else "Question"
        asked = [c["source"] for c in cells if f"**{kind} {name}** (" in c["source"]]
        assert len(asked) == 1
        assert f" {minutes[name]} minutes)." in asked[0]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_rubric_gives_the_points_of_its_question(source):
    for cell in sources.read(source).of_kind("written"):
        given = re.findall(r"^- (\d+(?:\.5)?) points?:", views.rubric(cell), re.MULTILINE)
        assert sum(map(float, given)) == cell.points, cell.name


def test_setup_cell_is_the_one_of_the_chapters():
    for source in SOURCES:
        cells = views.notebook(sources.read(source), solved=False)["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        assert code[0]["source"].strip() == views.SETUP_CELL.read_text(encoding="utf8").strip()
        assert views.OTTER in code[1]["source"]
        assert "pip" in code[1]["source"]

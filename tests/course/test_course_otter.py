"""The notebook of students, in a kernel of their environment, with otter-grader itself."""

import json
import subprocess

import project
import pytest
import sources
import views
from course_examples import ROOT, SOURCES, answers_only, with_cell

RUN = """
import sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
nbformat.validate(notebook)
NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[1])
"""
AS_COLAB = """
import otter.check.utils
otter.check.utils.get_ipython = lambda: "<google.colab._shell.Shell object>"
grader = otter.Notebook(tests_dir=str(folder))
assert grader.interpreter.name == "COLAB"
"""


@pytest.fixture(scope="module", params=[path.stem for path in SOURCES])
def run(request, tmp_path_factory, assignments, course_python):
    """An assignment, and what each of its cells said: solved, then as on Colab, then as a stub."""
    assignment = assignments[request.param]
    solved = answers_only(assignment)
    stub = answers_only(assignment, solved=False)
    notebook = with_cell(solved, AS_COLAB)
    checks = [c for c in solved["cells"] if c["source"].startswith("grader.check")]
    notebook["cells"] += [{**c, "id": f"colab-{c['id']}"} for c in checks]
    notebook["cells"] += [
        {**cell, "id": f"stub-{cell['id']}"}
        for cell in stub["cells"]
        if cell["id"].startswith(("answer-", "public-"))
    ]
    folder = tmp_path_factory.mktemp("a student")
    path = folder / "homework.ipynb"
    path.write_bytes(views.as_file(notebook))
    done = subprocess.run(
        [course_python, "-c", RUN, path.name], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    cells = json.loads(path.read_text())["cells"]
    said = {cell["id"]: _said(cell) for cell in cells if cell["cell_type"] == "code"}
    return assignment, folder, said


def _said(cell):
    texts = [output.get("text") or output["data"]["text/plain"] for output in cell["outputs"]]
    return "".join(part for text in texts for part in text)


def test_setup_writes_its_tests_and_installs_nothing(run):
    assignment, folder, said = run
    written = sorted(path.name for path in (folder / "tests" / assignment.stem).iterdir())
    assert written == sorted(f"{name}.py" for name in assignment.questions)
    assert said["tests"].startswith("Ready:")


def test_solution_passes_the_public_tests(run):
    assignment, _, said = run
    for name in assignment.questions:
        assert "All test cases passed" in said[f"public-{name}"], said[f"public-{name}"]
        assert "All test cases passed" in said[f"colab-public-{name}"]


def test_public_tests_tell_a_stub_what_is_missing(run):
    assignment, _, said = run
    for name in assignment.questions:
        text = said[f"stub-public-{name}"]
        assert "Test case failed" in text
        assert "return" in text, text


def test_public_tests_name_typical_mistakes(assignments, tmp_path, course_python):
    # Not all: some mistakes are left for the grading. But help is there for most.
    for assignment in assignments.values():
        wrong = [c for n in assignment.questions for c in assignment.of_kind("wrong", n)]
        names = {name: views.name_of_answer(assignment, name) for name in assignment.questions}
        tests = {
            name: f"name = '{name}'\n{views.public_head()}{views.public_test(assignment, name)}"
            for name in assignment.questions
        }
        script = [
            "import json, sys",
            "from otter.test_files.exception_test import ExceptionTestFile",
            f"tests = {tests!r}",
            f"imports = {assignment.of_kind('code')[0].text!r}",
            f"wrong = {[(c.name, names[c.name], c.text) for c in wrong]!r}",
            "said = []",
            "for question, name, text in wrong:",
            "    space = {}",
            "    exec(imports, space)",
            "    exec(text, space)",
            "    test = ExceptionTestFile.from_string(tests[question])",
            "    test.run(space)",
            "    failed = [r.message for r in test.test_case_results if not r.passed]",
            "    said.append([question, failed])",
            "json.dump(said, sys.stdout)",
        ]
        done = subprocess.run(
            [course_python, "-c", "\n".join(script)], capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr[-2000:]
        said = json.loads(done.stdout)
        caught = [failed for _, failed in said if failed]
        assert len(caught) >= len(said) / 2
        for message, *_ in caught:
            # A sentence of ours, not an exception from inside the answer.
            assert "AssertionError: " in message, message
            assert len(message.partition("AssertionError: ")[2]) > 20, message


def test_course_is_pinned_and_listed_once():
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert tuple(extras["optional-dependencies"]["course"]) == project.COURSE
    assert views.OTTER in project.COURSE
    assert views.OTTER in (ROOT / "constraints.txt").read_text().splitlines()


def test_course_environment_leaves_the_books_alone(course_python):
    code = "import otter, torch, sys; print(otter.__file__); print(torch.__file__)"
    done = subprocess.run([course_python, "-c", code], capture_output=True, text=True, check=True)
    otter, torch = done.stdout.splitlines()
    assert otter.startswith(project.course_folder())
    assert not torch.startswith(project.course_folder())
    here = subprocess.run(
        [project.venv_program("python"), "-c", "import otter"], capture_output=True
    )
    assert here.returncode != 0


def test_sources_are_read_as_they_are(assignments):
    for stem, assignment in assignments.items():
        text = (ROOT / "assignments" / f"{stem}.py").read_text()
        assert len(assignment.cells) == text.count("\n# %%") + text.startswith("# %%")
        assert sources.read(ROOT / "assignments" / f"{stem}.py") == assignment

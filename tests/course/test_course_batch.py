"""A batch that is interrupted, repeated, moderated, and refused where it must be."""

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time

import confine
import grade
import make
import pytest
import sources
import views
from course_examples import LIMITS, ROOT, answers_only, with_cell

NAME = "gradient-pieces"


@pytest.fixture
def batch(tmp_path, assignments, graders, monkeypatch):
    """A folder of three submissions, and a function that grades it with the shared process."""
    folder, out = tmp_path / "in", tmp_path / "grades.csv"
    folder.mkdir()
    notebook = answers_only(assignments[NAME])
    for name in ("ada", "ben", "eve"):
        (folder / f"{name}.ipynb").write_bytes(views.as_file(notebook))
    graded = []

    class Shared(grade.Grader):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.runners, self.started = graders[NAME].runners, []

        def grade(self, submission):
            graded.append(submission.name)
            return super().grade(submission)

    monkeypatch.setattr(grade, "Grader", Shared)
    archive = views.autograder(assignments[NAME])

    def run(**options):
        graded.clear()
        grade.grade_folder(folder, out, archive, quiet=True, limits=LIMITS, **options)
        return list(graded)

    return folder, out, run


def _rows(path):
    with path.open(newline="") as handle:
        return {row["submission"]: row for row in csv.DictReader(handle)}


def _edit(path, name, **changes):
    rows = _rows(path)
    rows[name].update(changes)
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, list(rows[name]))
        writer.writeheader()
        writer.writerows(rows.values())


def test_only_what_changed_is_graded_again(batch):
    folder, out, run = batch
    assert run() == ["ada.ipynb", "ben.ipynb", "eve.ipynb"]
    before = out.read_bytes()
    assert run() == []
    assert out.read_bytes() == before
    (folder / "ben.ipynb").write_text("{}")
    assert run() == ["ben.ipynb"]
    assert _rows(out)["ben.ipynb"]["status"] == "no notebook"
    (folder / "eve.ipynb").unlink()
    assert run() == []
    assert set(_rows(out)) == {"ada.ipynb", "ben.ipynb"}
    assert run(seed=1) == ["ada.ipynb", "ben.ipynb"]


def test_points_given_by_hand_stay_and_count(batch):
    folder, out, run = batch
    run()
    assert _rows(out)["ada.ipynb"]["w1"] == "0"
    _edit(out, "ada.ipynb", w1="2.5", adjust="-1", note="late")
    assert run() == []
    row = _rows(out)["ada.ipynb"]
    assert (row["w1"], row["adjust"], row["note"], row["total"]) == ("2.5", "-1", "late", "30.5")
    assert row["core"] == "30.5"
    # Another file means other written answers: what was given for the old ones is void.
    text = (folder / "ada.ipynb").read_text()
    (folder / "ada.ipynb").write_text(text.replace(views.WRITE_HERE, "Rank one.", 1))
    assert run() == ["ada.ipynb"]
    row = _rows(out)["ada.ipynb"]
    assert (row["w1"], row["adjust"], row["total"]) == ("", "", "29")
    assert "    Rank one." in out.with_suffix(".written.md").read_text()


def test_table_from_a_spreadsheet_with_semicolons_is_read(batch):
    _, out, run = batch
    run()
    _edit(out, "ada.ipynb", w2="1,5")
    with out.open(newline="") as handle:
        rows = list(csv.reader(handle))
    with out.open("w", newline="", encoding="utf-8-sig") as handle:
        csv.writer(handle, delimiter=";").writerows(rows)
    assert run() == []
    assert _rows(out)["ada.ipynb"]["total"] == "30.5"


def test_points_of_a_submission_that_is_gone_are_not_dropped(batch):
    folder, out, run = batch
    run()
    _edit(out, "ada.ipynb", w2="1.5")
    (folder / "ada.ipynb").rename(folder / "lovelace.ipynb")
    with pytest.raises(grade.GradingError, match=r"'ada\.ipynb' has points given by hand"):
        run()
    assert _rows(out)["ada.ipynb"]["w2"] == "1.5"


def test_folders_are_told_from_numbers(batch):
    folder, out, run = batch
    (folder / "0012345").mkdir()
    (folder / "ada.ipynb").rename(folder / "0012345" / "homework.ipynb")
    run()
    assert _rows(out)["0012345/"]["total"] == "29"
    assert all(row["file"].startswith("sha-") for row in _rows(out).values())


@pytest.mark.parametrize(("column", "value"), [("w1", "4"), ("w1", "-1"), ("adjust", "two")])
def test_impossible_points_are_named(batch, column, value):
    _, out, run = batch
    run()
    _edit(out, "ada.ipynb", **{column: value})
    with pytest.raises(grade.GradingError, match=f"{column} of ada.ipynb is '{value}'"):
        run()


def test_foreign_table_is_not_overwritten(batch):
    _, out, run = batch
    out.write_text("name,mark\nada,1\n")
    with pytest.raises(grade.GradingError, match="no table of this assignment"):
        run()
    assert out.read_text() == "name,mark\nada,1\n"


def _descendants(parent):
    """The processes a process started, and those they started."""
    children = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as handle:
            if int(handle.read().rpartition(")")[2].split()[1]) == parent:
                children += [int(name), *_descendants(int(name))]
    return children


def test_batch_goes_on_after_a_kill(tmp_path, assignments):
    make.make(ROOT / "assignments" / f"{NAME}.py", tmp_path)
    folder, out = tmp_path / "in", tmp_path / "grades.csv"
    folder.mkdir()
    good = answers_only(assignments[NAME])
    (folder / "a.ipynb").write_bytes(views.as_file(good))
    slow = with_cell(good, "import time\ntime.sleep(30)")
    (folder / "b.ipynb").write_bytes(views.as_file(slow))
    script = (
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT / 'course')!r})\n"
        "import grade\nfrom pathlib import Path\n"
        f"archives = grade.load_archives(Path({str(tmp_path / 'autograder')!r}))\n"
        "archive = grade.choose(archives, None)\n"
        f"grade.grade_folder(Path({str(folder)!r}), Path({str(out)!r}), archive)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE)
    end = time.monotonic() + 120
    while not out.exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert process.poll() is None
    # The process that runs submissions, and its copy with the slow one.
    while len(family := _descendants(process.pid)) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    end = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{each}") for each in family):
        assert time.monotonic() < end, "a submission runs on after its grading was killed"
        time.sleep(0.1)
    assert set(_rows(out)) == {"a.ipynb"}
    (folder / "b.ipynb").write_bytes(views.as_file(good))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 of 2 are graded already" in done.stderr
    assert "Grading" in done.stderr
    assert [row["total"] for row in _rows(out).values()] == ["29", "29"]


def test_error_of_the_grading_itself_stops_nothing(batch, monkeypatch):
    _, out, run = batch
    real, failing = grade.Grader._judge, ["ben.ipynb"]

    def judge(self, submission, how, said):
        if submission.name in failing:
            raise OSError("no space left")
        return real(self, submission, how, said)

    monkeypatch.setattr(grade.Grader, "_judge", judge)
    run()
    rows = _rows(out)
    assert rows["ben.ipynb"]["status"] == "not graded"
    assert "no space left" in rows["ben.ipynb"]["message"]
    assert rows["eve.ipynb"]["total"] == "29"
    failing.clear()
    assert run() == ["ben.ipynb"]
    assert _rows(out)["ben.ipynb"]["total"] == "29"


def test_runner_that_dies_is_started_again(assignments, graders):
    with grade.Grader(views.autograder(assignments[NAME]), limits=LIMITS) as grader:
        one = grade.Submission("ada", views.as_file(answers_only(assignments[NAME])))
        assert grader.grade(one)["status"] == "graded"
        (runner,) = grader.started
        runner.process.kill()
        runner.process.wait()
        assert grader.grade(one)["q1"] == "4"


def test_every_archive_is_chosen_by_name(tmp_path):
    with pytest.raises(grade.GradingError, match="run 'make assignments' first"):
        grade.load_archives(tmp_path)
    make.make(ROOT / "assignments" / f"{NAME}.py", tmp_path)
    folder = tmp_path / "autograder"
    archives = grade.load_archives(folder)
    assert grade.choose(archives, None)["stem"] == NAME
    with pytest.raises(grade.GradingError, match=f"one of {NAME} is needed"):
        grade.choose(archives, "other")
    (folder / "other.zip").write_bytes((folder / f"{NAME}.zip").read_bytes())
    with pytest.raises(grade.GradingError, match="name the assignment"):
        grade.choose(grade.load_archives(folder), None)
    (folder / "other.zip").write_bytes((folder / f"{NAME}.zip").read_bytes()[:20_000])
    with pytest.raises(grade.GradingError, match=r"other\.zip cannot be read .*make assignments"):
        grade.load_archives(folder)


@pytest.mark.parametrize("made", [False, True])
def test_folder_without_submissions_is_named(tmp_path, made):
    folder = tmp_path / "in"
    if made:
        folder.mkdir()
    with pytest.raises(grade.GradingError, match="is empty" if made else "no folder"):
        grade.submissions(folder)


def test_table_in_no_folder_is_named_before_anything_is_graded(assignments, tmp_path):
    (tmp_path / "a.ipynb").write_text("{}")
    archive = views.autograder(assignments[NAME])
    with pytest.raises(grade.GradingError, match="nowhere is no folder"):
        grade.grade_folder(tmp_path, tmp_path / "nowhere" / "grades.csv", archive)


def test_what_was_made_of_a_source_that_is_gone_is_removed(tmp_path):
    for name in ("student/gone.ipynb", "autograder/gone.zip", "autograder/kept.zip"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    make._drop_others(tmp_path, {"kept"})
    assert [path.name for path in tmp_path.rglob("*.*")] == ["kept.zip"]


def test_system_that_cannot_confine_grades_nothing(assignments, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(confine, "landlock_version", lambda: -1)
    with (
        pytest.raises(grade.GradingError, match="needs Landlock"),
        grade.Grader(views.autograder(assignments[NAME])),
    ):
        pass
    with pytest.raises(confine.CannotConfine, match="Landlock"):
        confine.confine(str(tmp_path), [], data=1, seconds=1, file_size=1)


def test_command_fails_in_one_line(tmp_path):
    command = [sys.executable, "course/grade.py", str(tmp_path / "none"), str(tmp_path / "o.csv")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1


def test_core_and_total_are_summed(tmp_path, assignments, graders):
    name = "break-a-claim"
    archive = views.autograder(assignments[name])
    assert archive["further"] == ["q8", "w4"]
    table = grade.Table(tmp_path / "grades.csv", archive)
    row = {"submission": "ada", "status": "graded", "file": "sha-1", "assignment": name}
    points = {question: "1" for question in archive["questions"]}
    table.put({**row, **points}, dict.fromkeys(archive["written"], "text"))
    table.rows["ada"].update(w1="2", w4="3", adjust="-0.5")
    table.save(["ada"])
    row = _rows(tmp_path / "grades.csv")["ada"]
    # Seven questions and w1 of the core; q8 and w4 beside it. A correction counts in both.
    assert (row["core"], row["total"]) == ("8.5", "12.5")


@pytest.fixture
def foreign(batch, assignments):
    """The batch, with notebooks that are not of its assignment among the submissions."""
    folder, out, run = batch
    other = assignments["spikes-and-rates"]
    notebook = answers_only(other)
    for cell in notebook["cells"]:
        if cell["id"] == "written-w1":
            cell["source"] = f"{views.written_mark('w1')} (2 points).**\n\nOf the other."
    (folder / "ben.ipynb").write_bytes(views.as_file(notebook))
    cells = [{"cell_type": "code", "source": "print('residue', 1)"}]
    (folder / "eve.ipynb").write_bytes(views.as_file({"cells": cells}))
    (folder / "mad.ipynb").write_text("{'no': json")
    (folder / "zoe.txt").write_text("I was ill.")
    return folder, out, lambda **options: run(others=[views.autograder(other)], **options)


def test_notebook_of_another_assignment_is_told_in_one_line(foreign):
    _, out, run = foreign
    run()
    rows = _rows(out)
    assert rows["ada.ipynb"]["total"] == "29"
    assert rows["ben.ipynb"]["status"] == "another assignment"
    assert rows["ben.ipynb"]["message"] == (
        "this seems to be the notebook of 'Spikes and rates' (spikes-and-rates), "
        "not of 'The gradient and its pieces' (gradient-pieces)"
    )
    assert rows["eve.ipynb"]["status"] == "no assignment"
    assert rows["eve.ipynb"]["message"].startswith("it defines none of residue, layer_gradient,")
    assert rows["mad.ipynb"]["message"] == "this file is no notebook, or one without cells"
    for name in ("ben.ipynb", "eve.ipynb", "mad.ipynb", "zoe.txt"):
        assert (rows[name]["total"], rows[name]["core"], rows[name]["w1"]) == ("0", "0", "0")


def test_broken_submissions_are_listed_once_on_the_page_of_written_answers(foreign):
    _, out, run = foreign
    run()
    page = out.with_suffix(".written.md").read_text()
    for name, status in (("ben.ipynb", "another assignment"), ("zoe.txt", "no notebook")):
        assert page.count(name) == 1
        assert f"- {name}: {status}" in page
    assert "Of the other." not in page
    assert "(nothing)" not in page
    assert page.count("Left empty, 0 points: ada.ipynb\n") == 3
    assert "### ada.ipynb" not in page


def test_answer_under_another_form_is_no_foreign_notebook(assignments):
    ours, other = (views.autograder(assignments[n]) for n in (NAME, "spikes-and-rates"))

    def told(code):
        content = views.as_file({"cells": [{"cell_type": "code", "source": code}]})
        return grade.foreign(content, ours, [other])[0]

    assert told("residue = lambda f, y, loss: f - y") == ""
    assert told("if True:\n    def residue(f, y, loss):\n        return f - y") == ""
    assert told("from work import layer_gradient as g, residue") == ""
    for text in ("\n" * 5_000_000, " " * 5_000_000, "x" * 5_000_000, "def " * 1_000_000):
        start = time.monotonic()
        assert told(text) == "no assignment"
        assert time.monotonic() - start < 20
    assert told("def residues(f):\n    return f\nresidue_of = 3") == "no assignment"
    # A few helpers with another assignment's names do not make it that assignment's notebook.
    names = list(other["functions"].values())
    helpers = "".join(f"def {name}():\n    pass\n" for name in names[:3])
    assert told("def residue():\n    pass\n" + helpers) == ""
    many = "".join(f"def {name}():\n    pass\n" for name in names[:5])
    assert told("def residue():\n    pass\n" + many) == "another assignment"


def test_table_of_another_assignment_is_named_and_left(batch, assignments, tmp_path):
    folder, out, run = batch
    run()
    before = out.read_bytes(), out.with_suffix(".written.md").read_bytes()
    other = views.autograder(assignments["activations-regularisers"])
    with pytest.raises(grade.GradingError) as failure:
        grade.grade_folder(folder, out, other, quiet=True, limits=LIMITS)
    assert str(failure.value) == (
        f"{out} is the table of '{NAME}', but 'activations-regularisers' is to be graded: "
        "name another file, OUT=..., or the other assignment"
    )
    assert before == (out.read_bytes(), out.with_suffix(".written.md").read_bytes())


WRITER = """
import sys, time
sys.path.insert(0, {course!r})
import make
from pathlib import Path
print("ready", flush=True)
while True:
    make.make(Path({source!r}), Path({out!r}))
"""


def test_archives_are_whole_while_others_make_them(tmp_path):
    source = ROOT / "assignments" / f"{NAME}.py"
    make.make(source, tmp_path)
    expected = grade.load_archives(tmp_path / "autograder")
    script = WRITER.format(course=str(ROOT / "course"), source=str(source), out=str(tmp_path))
    command = [sys.executable, "-c", script]
    # Two of them, which also write the same file at the same time.
    writers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for each in writers:
            assert each.stdout.readline() == "ready\n"
        changes, stamp, end = 0, None, time.monotonic() + 60
        path = tmp_path / "autograder" / f"{NAME}.zip"
        while changes < 200:
            assert grade.load_archives(tmp_path / "autograder") == expected
            seen = path.stat().st_ino
            changes, stamp = changes + (seen != stamp), seen
            assert time.monotonic() < end, f"only {changes} archives in a minute"
        assert all(each.poll() is None for each in writers), "one that made them has failed"
    finally:
        for each in writers:
            each.kill()
            each.wait()
            each.stdout.close()


def test_grading_asks_for_the_assignment_before_anything_is_made(tmp_path, monkeypatch, capsys):
    import project

    made = []
    monkeypatch.setattr(project, "make_environment", lambda extras: made.append(extras))
    monkeypatch.setattr(project, "run_in_environment", lambda *a: made.append(a[:2]) or 0)
    folder, out = str(tmp_path), str(tmp_path / "grades.csv")
    assert project.main(["grade", folder, out]) == 1
    said = capsys.readouterr().err
    assert "Name the assignment, ASSIGNMENT=... , one of activations-regularisers, " in said
    assert project.main(["grade", folder, out, "--assignment", "spikes"]) == 1
    assert "No assignment 'spikes': one of " in capsys.readouterr().err
    assert project.main(["grade", folder + "/none", out, "--assignment", NAME]) == 1
    said = capsys.readouterr().err
    assert "name the one with the submissions" in said and len(said.splitlines()) == 1
    assert made == []
    assert project.main(["grade", folder, out, "--assignment", NAME, "--seed", "1"]) == 0
    make_it, grade_it = (os.path.join("course", name) for name in ("make.py", "grade.py"))
    assert made == [["book"], (make_it, "--archives"), (grade_it, folder)]


def test_archives_alone_are_those_of_all_that_is_made(tmp_path, monkeypatch):
    import reads

    monkeypatch.setattr(reads, "data_read", lambda *a: pytest.fail("a solution was run"))
    assert make.main(["--out", str(tmp_path / "a"), "--archives"]) == 0
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["autograder"]
    archives = grade.load_archives(tmp_path / "a" / "autograder")
    assert set(archives) == {path.stem for path in (ROOT / "assignments").glob("*.py")}
    make.make(ROOT / "assignments" / f"{NAME}.py", tmp_path / "b")
    name = f"autograder/{NAME}.zip"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.fixture
def solved(assignments):
    return views.notebook(assignments[NAME], solved=True)


def test_kernel_that_dies_unused_is_started_again(monkeypatch, solved):
    import execute
    import reads

    tried = []

    def run(node, folder, progress):
        tried.append(node)
        if len(tried) < 3:
            raise RuntimeError("Kernel died before replying to kernel_info")
        return ("mnist_subset.npz",)

    monkeypatch.setattr(execute, "run", run)
    assert reads._run(NAME, solved) == ("mnist_subset.npz",)
    # A cell that fails is no accident, and a kernel that always dies is none either.
    tried.clear()
    monkeypatch.setattr(execute, "run", lambda *a, **k: tried.append(1) or 1 / 0)
    with pytest.raises(sources.SourceError, match="ZeroDivisionError"):
        reads._run(NAME, solved)
    assert len(tried) == 1

    def always(node, folder, progress):
        tried.append(node)
        raise RuntimeError("Kernel died before replying to kernel_info")

    tried.clear()
    monkeypatch.setattr(execute, "run", always)
    with pytest.raises(sources.SourceError, match="Kernel died"):
        reads._run(NAME, solved)
    assert len(tried) == 3


def test_kernel_that_died_unused_leaves_nothing_to_the_end_of_python(tmp_path):
    place = tmp_path / "kernels" / "dies"
    place.mkdir(parents=True)
    spec = {"argv": [sys.executable, "-c", "0", "{connection_file}"], "display_name": "dies"}
    (place / "kernel.json").write_text(json.dumps({**spec, "language": "python"}))
    script = (
        f"import sys\nsys.path.insert(0, {str(ROOT / 'tools')!r})\n"
        "import execute, nbformat\nfrom pathlib import Path\n"
        "node = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell('1')])\n"
        "node.metadata['kernelspec'] = {'name': 'dies'}\n"
        "try:\n    execute.run(node, Path('.'))\n"
        "except RuntimeError as error:\n    print('told:', error)\n"
    )
    environment = {**os.environ, "JUPYTER_PATH": str(tmp_path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert "told: Kernel died" in done.stdout
    assert "AssertionError" not in done.stderr, done.stderr[-1500:]

"""Grade a folder of submissions into one table, safely and without Docker.

    python course/grade.py SUBMISSIONS OUT.csv [--assignment NAME] [--workers N] [--seed K]

Stop it whenever you like: the same command goes on where it was, and grades again what changed.
Points typed into the columns of written answers and into `adjust` stay, and enter the total.

Three processes share the work. One (runner.py) runs submissions, each in a confined copy of
itself that knows neither tests nor expected values. This one draws the arguments, reads what came
back as plain numbers, and compares. Nothing a submission defines is ever executed here.
"""

import argparse
import contextlib
import csv
import io
import json
import os
import queue
import re
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import confine
import hidden
import make
import plain
import runner
import sources
import views
from tqdm import tqdm

import lowgrad_utils
from lowgrad_utils.files import data_folder, write_whole

LARGEST_NOTEBOOK = 10_000_000
LIMITS = {"seconds": 180.0, "cell": 60.0, "call": 20.0, "memory": 800_000_000, "output": 20_000_000}
KEPT_VARIABLES = r"(PATH|HOME|TMPDIR|TZ|LANG|LC_\w+|LD_LIBRARY_PATH|OPENBLAS_\w+|MPLCONFIGDIR)$"
STATUS = {
    "time": "stopped: too long",
    "memory": "stopped: too much memory",
    "output": "stopped: too much output",
    "processes": "stopped: too many threads",
}
#: Rows without anything that belongs to this assignment.
NOTHING_TO_GRADE = ("no notebook", "another assignment", "no assignment")
LEFT_OPEN = "it returned nothing"
#: Nothing in it goes back over what it has read, so that no text takes long.
DEFINITION = re.compile(
    r"^[ \t]*+(?:(?:async[ \t]++)?def[ \t]++(\w++)|(?:from|import)\b(?=(.*+))|(\w++)[ \t]*+[:=])",
    re.MULTILINE,
)


class GradingError(Exception):
    """Something that keeps the whole batch from being graded; told in one line."""


@dataclass(frozen=True)
class Submission:
    """One entry of the folder of submissions.

    Attributes:
        name: Its name there.
        content: The bytes of its notebook, empty if there is none.
        problem: Why there is none, empty if there is one.
    """

    name: str
    content: bytes = field(repr=False, default=b"")
    problem: str = ""


def submissions(folder: Path) -> list[Submission]:
    """Return what was handed in: notebooks, and zip files or folders with one notebook each.

    Args:
        folder: The folder of submissions.

    Raises:
        GradingError: It does not exist, or is empty.
    """
    if not folder.is_dir():
        raise GradingError(f"no folder {folder}: name the one with the submissions")
    names = sorted(n for n in os.listdir(folder) if not n.startswith((".", "__")))
    found = [_submission(folder / n) for n in names if not n.endswith((".csv", ".written.md"))]
    if not found:
        raise GradingError(f"{folder} is empty: no submission to grade")
    return found


def _submission(path: Path) -> Submission:
    try:
        if path.is_symlink():
            return Submission(path.name, problem="a link, not a file")
        if path.is_dir():
            return _from_folder(path)
        if path.suffix == ".zip":
            return _from_zip(path)
        if path.suffix != ".ipynb":
            return Submission(path.name, problem="not a notebook (.ipynb)")
        return Submission(path.name, _bytes(path))
    except (OSError, ValueError, zipfile.BadZipFile, RuntimeError) as error:
        return Submission(
            path.name, problem=f"cannot be read: {' '.join(str(error).split())[:150]}"
        )


def _from_folder(path: Path) -> Submission:
    # With a slash: a spreadsheet would take 0012345 for a number.
    name = path.name + "/"
    inside = [
        Path(where) / file
        for where, _, files in os.walk(path)
        for file in files
        if file.endswith(".ipynb") and ".ipynb_checkpoints" not in where
    ]
    if len(inside) != 1:
        return Submission(name, problem=_not_one(len(inside), "folder"))
    return Submission(name, _bytes(inside[0]))


def _not_one(count: int, where: str) -> str:
    return f"{f'{count} notebooks' if count else 'no notebook'} in this {where}; one is needed"


def _from_zip(path: Path) -> Submission:
    with zipfile.ZipFile(path) as archive:
        names = [n for n in archive.namelist() if n.endswith(".ipynb") and "__MACOSX" not in n]
        if len(names) != 1:
            return Submission(path.name, problem=_not_one(len(names), "file"))
        with archive.open(names[0]) as handle:
            return Submission(path.name, _not_too_large(handle.read(LARGEST_NOTEBOOK + 1)))


def _bytes(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError("no ordinary file")
        return _not_too_large(file.read(LARGEST_NOTEBOOK + 1))


def _not_too_large(content: bytes) -> bytes:
    if len(content) > LARGEST_NOTEBOOK:
        raise ValueError(f"larger than {LARGEST_NOTEBOOK // 10**6} MB")
    return content


class Runner:
    """The process that runs submissions, started when needed and again should it ever die.

    Args:
        withheld: The functions of the package that it does without.
    """

    def __init__(self, withheld: list[str]):
        self.withheld = withheld
        self.process: subprocess.Popen | None = None

    def run(self, job: dict[str, Any]) -> str:
        """Run one job (folder, limits) and return how it ended, in one word."""
        if self.process is None or self.process.poll() is not None:
            self._start()
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return self._line().get("how", "ended")

    def _start(self) -> None:
        package = Path(lowgrad_utils.__file__).parent
        program = str(Path(runner.__file__).resolve())
        # No more of the instructor's environment than numerical libraries look at.
        kept = {k: v for k, v in os.environ.items() if re.match(KEPT_VARIABLES, k)}
        threads = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-B", program),
                *(str(package), str(data_folder(".")), *self.withheld),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**kept, **threads, "MPLBACKEND": "agg"},
            # Ctrl-C reaches this process alone, which then ends the other in its own order.
            start_new_session=True,
            text=True,
        )
        problem = self._line().get("problem", "it ended at once, see above")
        if problem:
            raise GradingError(f"submissions cannot be run on this machine: {problem}")

    def _line(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        return json.loads(line) if line else {}

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self.process.stdout.close()


class Grader:
    """Grades submissions of one assignment.

    Args:
        archive: The assignment's private list (`views.autograder`).
        seed: Decides the random instances.
        limits: What a submission may use; see `LIMITS`.
        workers: How many run at once.
        others: The lists of other assignments, by which their notebooks are recognised.
    """

    def __init__(
        self,
        archive: dict[str, Any],
        *,
        others: Iterable[dict[str, Any]] = (),
        seed: int = 0,
        limits: dict[str, float] | None = None,
        workers: int = 1,
    ):
        self.archive, self.workers, self.others = archive, workers, list(others)
        self.limits = {**LIMITS, **(limits or {})}
        self.tests = hidden.load(archive, seed)
        self.calls = [wanted.form() for test in self.tests for wanted in test.calls]
        self.version = views.digest(views.as_file(archive) + str(seed).encode())
        self.runners: queue.SimpleQueue[Runner] = queue.SimpleQueue()
        self.started = [Runner(archive["withheld"]) for _ in range(workers)]
        for each in self.started:
            self.runners.put(each)

    def __enter__(self) -> "Grader":
        lacking = confine.missing()
        if lacking:
            raise GradingError(
                f"grading needs {lacking}: use such a machine, a virtual one will do"
            )
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.started:
            each.stop()

    def grade(self, submission: Submission) -> dict[str, Any]:
        """Return status, points by question, and a message, for one submission."""
        if submission.problem:
            return self._row(submission, "no notebook", [], submission.problem)
        status, why = foreign(submission.content, self.archive, self.others)
        if status:
            return self._row(submission, status, [], why)
        try:
            return self._judge(submission, *self._run(submission))
        except Exception as error:
            if isinstance(error, GradingError):
                raise
            # Whatever it was, the others are graded; without versions this one is tried again.
            row = self._row(submission, "not graded", [], f"{type(error).__name__}: {error}")
            return {**row, "file": "", "tests": ""}

    def _run(self, submission: Submission) -> tuple[str, list[dict]]:
        """Return how a submission ended, and the lines it left."""
        one = self.runners.get()
        try:
            with _empty_folder() as folder:
                # What a submission finds there is itself, and the arguments of the calls.
                Path(folder, runner.NOTEBOOK).write_bytes(submission.content)
                Path(folder, runner.CALLS).write_text(json.dumps(self.calls), encoding="utf8")
                how = one.run({"folder": folder, "limits": self.limits})
                path = os.path.join(folder, runner.ANSWERS)
                return how, plain.lines(path, int(self.limits["output"]))
        finally:
            self.runners.put(one)

    def _judge(self, submission: Submission, how: str, said: list[dict]) -> dict[str, Any]:
        cells = {
            line["cell"]: line["problem"]
            for line in said
            if isinstance(line.get("cell"), int) and isinstance(line.get("problem"), str)
        }
        answers = {line["call"]: line for line in said if isinstance(line.get("call"), int)}
        status, note = "graded", ""
        if how != "ended":
            status, note = STATUS.get(how, "stopped"), f"it met the limit on {how}"
        elif not any(line.get("done") is True for line in said):
            status, note = "ended early", "it ended Python itself, or crashed it"
        lost = "no answer by then" if note else "no answer"
        results, first = [], 0
        for test in self.tests:
            wanted = range(first, first + len(test.calls))
            first = wanted.stop
            given = [answers.get(number, {"problem": lost}) for number in wanted]
            results.append((test, test.verdict(given)))
        gaps = self._left_open(submission, results)
        if set(gaps) & set(self.archive["further"]):
            # Cells below that need those answers fail, as the notebook says they would.
            end = _first_further_cell(submission.content)
            cells = {number: problem for number, problem in cells.items() if number < end}
        problems = [f"cell {number}: {problem}" for number, problem in cells.items()]
        failures = _failures([each for each in results if each[0].question not in gaps])
        left = [f"left open: {', '.join(gaps)}"] if gaps else []
        # What was left open explains most of what follows.
        reasons = [*([note] if note else []), *left, *problems[:3], *failures]
        return self._row(submission, status, results, "; ".join(reasons))

    def _left_open(self, submission: Submission, results: list[tuple]) -> list[str]:
        """Return the questions whose gaps are as they were handed out."""
        sources = [source for kind, source in _cells(submission.content) if kind == "code"]
        stubs = _defined("\n".join(source for source in sources if views.TODO in source))
        found = []
        for question, name in self.archive["functions"].items():
            said = {why for test, why in results if test.question == question}
            if said == {LEFT_OPEN} and name in stubs:
                found.append(question)
        return found

    def _row(
        self, submission: Submission, status: str, results: list[tuple], message: str
    ) -> dict[str, Any]:
        points = {
            name: sum(test.points for test, why in results if test.question == name and not why)
            for name in self.archive["questions"]
        }
        return {
            "submission": submission.name,
            "status": status,
            **{name: f"{value:g}" for name, value in points.items()},
            "message": message[:1500],
            "assignment": self.archive["stem"],
            "file": views.digest(submission.content),
            "tests": self.version,
        }


@contextlib.contextmanager
def _empty_folder() -> Iterator[str]:
    """Make a folder for one submission, and remove it with all that was left in it."""
    folder = os.path.realpath(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        # Not shutil: folders in folders, a thousand deep, are too many for Python's stack.
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*command, folder], stderr=subprocess.DEVNULL, check=False)


def _failures(results: list[tuple]) -> Iterator[str]:
    """Say once a question what failed, test by test only where the reasons differ."""
    for question in dict.fromkeys(test.question for test, _ in results):
        reasons = {test.title: why for test, why in results if test.question == question}
        if len(set(reasons.values())) == 1:
            why = next(iter(reasons.values()))
            yield from [f"{question}: {why}"] if why else []
        else:
            yield from (f"{question} ({title}): {why}" for title, why in reasons.items() if why)


def _cells(content: bytes) -> list[tuple[str, str]]:
    """Return kind and source of each cell of a notebook; none if it is no notebook."""
    try:
        cells = json.loads(content)["cells"]
        found = [(cell["cell_type"], cell["source"]) for cell in cells]
        return [(kind, text if isinstance(text, str) else "".join(text)) for kind, text in found]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []


def _first_further_cell(content: bytes) -> float:
    head = views.FURTHER.splitlines()[0]
    numbers = (n for n, (_, source) in enumerate(_cells(content), 1) if source.startswith(head))
    return next(numbers, float("inf"))


def _defined(code: str) -> set[str]:
    """Return the names that code gives a value, as far as its lines tell; quick on any text."""
    found = set()
    for function, imported, name in DEFINITION.findall(code):
        found |= {function, name, *re.findall(r"\w+", imported)}
    return found


def foreign(
    content: bytes, archive: dict[str, Any], others: Iterable[dict[str, Any]]
) -> tuple[str, str]:
    """Tell a notebook of this assignment from any other, by the functions that it defines.

    Args:
        content: The bytes of the notebook.
        archive: The list of the assignment that is graded.
        others: Those of the other assignments.

    Returns:
        A status and what is wrong, in one line; both empty for a notebook of this assignment.
    """
    cells = _cells(content)
    if not cells:
        return "no notebook", "this file is no notebook, or one without cells"
    defined = _defined("\n".join(source for kind, source in cells if kind == "code"))

    def share(each: dict[str, Any]) -> float:
        names = set(each["functions"].values())
        return len(names & defined) / len(names)

    # One name alone may be a coincidence; a submission that defines most of another's is that.
    best = max(others, key=share, default=None)
    wanted = f"'{archive['title']}' ({archive['stem']})"
    if best and share(best) >= 0.5 and share(best) > share(archive):
        this = f"'{best['title']}' ({best['stem']})"
        return "another assignment", f"this seems to be the notebook of {this}, not of {wanted}"
    if share(archive) == 0:
        names = list(archive["functions"].values())
        return "no assignment", f"it defines none of {', '.join(names)}: no notebook of {wanted}"
    return "", ""


def written_answers(archive: dict[str, Any], content: bytes) -> dict[str, str]:
    """Return the written answers of a notebook by question, empty where there is none.

    Args:
        archive: The assignment's private list.
        content: The bytes of the notebook.
    """
    found = dict.fromkeys(archive["written"], "")
    for kind, source in _cells(content):
        for name in found:
            if kind == "markdown" and source.startswith(views.written_mark(name)):
                text = source.partition("\n")[2].replace(views.WRITE_HERE, "").strip()
                found[name] = text
    return found


class Table:
    """The CSV with the grades, which is at once what a later run goes on from.

    Args:
        path: The file; what an earlier run or an instructor wrote there is read.
        archive: The assignment's private list.

    Raises:
        GradingError: There is a file that is no such table, or has points that are none.
    """

    def __init__(self, path: Path, archive: dict[str, Any]):
        self.path, self.archive = path, archive
        self.by_hand = [*archive["written"], "adjust", "note"]
        self.columns = [
            *("submission", "status", *archive["questions"], *archive["written"]),
            *("adjust", "core", "total", "message", "note", "assignment", "file", "tests"),
        ]
        self.rows = {row["submission"]: row for row in self._read()}

    def _read(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        with self.path.open(encoding="utf-8-sig", newline="") as handle:
            # Spreadsheets set up for some languages write semicolons.
            separator = max(",;\t", key=handle.readline().count)
            handle.seek(0)
            rows = list(csv.DictReader(handle, delimiter=separator))
        if rows and not {"submission", "status", "assignment", "file", "tests"} <= set(rows[0]):
            raise GradingError(f"{self.path} is no table of this assignment: name another file")
        stem = self.archive["stem"]
        for row in rows:
            if row["assignment"] != stem:
                other = row["assignment"] or "nothing"
                raise GradingError(
                    f"{self.path} is the table of '{other}', but '{stem}' is to be graded: name "
                    "another file, OUT=..., or the other assignment"
                )
            row["submission"] = re.sub(r"^'(?=[=+@-])", "", row["submission"])
            for name in self.by_hand[:-1]:
                self._points(row, name)
        return rows

    def _points(self, row: dict[str, str], name: str) -> float:
        text = (row.get(name) or "").strip()
        most = self.archive["written"].get(name, {"points": float("inf")})["points"]
        try:
            value = float(text.replace(",", ".") or 0)
        except ValueError:
            value = float("nan")
        if not (value <= most and (name == "adjust" or value >= 0)):
            raise GradingError(
                f"{self.path}: {name} of {row['submission']} is '{text}', "
                f"but a number from 0 to {most:g} is needed"
            )
        return value

    def check_names(self, names: list[str]) -> None:
        """Stop where points that somebody typed belong to no submission any more."""
        for name in set(self.rows) - set(names):
            if any(self._points(self.rows[name], column) for column in self.by_hand[:-1]):
                raise GradingError(
                    f"{self.path}: '{name}' has points given by hand, but no such submission is "
                    "there: give it its name again, or delete the row"
                )

    def has(self, submission: Submission, version: str) -> bool:
        """Whether this very file was graded with these very tests."""
        row = self.rows.get(submission.name, {})
        return (row.get("file"), row.get("tests")) == (views.digest(submission.content), version)

    def put(self, row: dict[str, Any], written: dict[str, str]) -> None:
        """Take in a newly graded row; points given by hand stay while the file is the same."""
        old = self.rows.get(row["submission"], {})
        same = old.get("file") == row["file"]
        by_hand = {name: old.get(name, "") if same else "" for name in self.by_hand}
        blank = {name: "0" for name, text in written.items() if not text and not by_hand[name]}
        self.rows[row["submission"]] = {**row, **by_hand, **blank}

    def save(self, names: list[str]) -> None:
        """Write the table whole, rows in the order of `names`, totals summed anew."""
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, self.columns, extrasaction="ignore", restval="")
        writer.writeheader()
        for name in names:
            if name in self.rows:
                row = self.rows[name]
                earned = {q: float(row.get(q) or 0) for q in self.archive["questions"]}
                earned |= {name: self._points(row, name) for name in self.by_hand[:-1]}
                beside = sum(earned[name] for name in self.archive["further"])
                total = sum(earned.values())
                row["core"], row["total"] = f"{total - beside:g}", f"{total:g}"
                writer.writerow({key: _harmless(key, value) for key, value in row.items()})
        write_whole(self.path, buffer.getvalue().encode("utf8"))


def _harmless(key: str, value: str) -> str:
    """Return a text that no spreadsheet takes for a formula or for more than one line."""
    text = "".join(c if c.isprintable() else " " for c in str(value))
    formula = key in ("submission", "status", "message") and text[:1] in ("=", "+", "-", "@")
    return "'" + text if formula else text


def written_page(
    archive: dict[str, Any], answers: dict[str, dict[str, str]], broken: dict[str, str]
) -> str:
    """Return a page in Markdown with all written answers, question by question.

    Args:
        archive: The assignment's private list.
        answers: For each submission its written answers.
        broken: For each submission that has none, since it is none, its status.
    """
    parts = [f"# {archive['title']}: written answers\n"]
    if broken:
        rows = [f"- {_line(name)}: {status}" for name, status in broken.items()]
        parts.append("Nothing to read in these (see their messages):\n\n" + "\n".join(rows) + "\n")
    for name, question in archive["written"].items():
        further = "further question, " if name in archive["further"] else ""
        parts.append(f"## {name} ({further}{question['points']:g} points)\n")
        parts.append(f"**Model answer.** {question['model']}\n")
        parts.append(f"**Rubric**\n\n{question['rubric']}\n")
        empty = [_line(submission) for submission, texts in answers.items() if not texts[name]]
        if empty:
            parts.append(f"Left empty, 0 points: {', '.join(empty)}\n")
        for submission, texts in answers.items():
            # As code: what a student writes is shown, never rendered.
            shown = "\n".join("    " + line for line in texts[name].splitlines())
            if shown:
                parts.append(f"### {_line(submission)}\n\n{shown}\n")
    return "\n".join(parts)


def _line(submission: str) -> str:
    return submission.replace("<", " ")


def grade_folder(
    folder: Path, out: Path, archive: dict[str, Any], *, quiet: bool = False, **options: Any
) -> None:
    """Grade all submissions of a folder that are not graded yet.

    Args:
        folder: The folder of submissions.
        out: The table to write; `out` with the ending `.written.md` gets the written answers.
        archive: The assignment's private list.
        quiet: Whether to show no progress.
        **options: others, seed, limits and workers of `Grader`.

    Raises:
        GradingError: The batch cannot be graded.
    """
    found = submissions(folder)
    if not out.parent.is_dir():
        raise GradingError(f"{out.parent} is no folder, and the table is to be written into it")
    names = [each.name for each in found]
    table = Table(out, archive)
    table.check_names(names)
    nothing = dict.fromkeys(archive["written"], "")
    written = {each.name: written_answers(archive, each.content) for each in found}
    with Grader(archive, **options) as grader:
        left = [each for each in found if not table.has(each, grader.version)]
        if len(left) < len(found) and not quiet:
            print(f"{len(found) - len(left)} of {len(found)} are graded already", file=sys.stderr)
        for row in tqdm(_graded(grader, left), "Grading", len(left), disable=quiet):
            ours = row["status"] not in NOTHING_TO_GRADE
            table.put(row, written[row["submission"]] if ours else nothing)
            table.save(names)
    table.save(names)
    statuses = {name: table.rows[name]["status"] for name in names}
    broken = {name: status for name, status in statuses.items() if status in NOTHING_TO_GRADE}
    answers = {name: texts for name, texts in written.items() if name not in broken}
    page = written_page(archive, answers, broken)
    write_whole(out.with_suffix(".written.md"), page.encode("utf8"))


def _graded(grader: Grader, left: list[Submission]) -> Iterator[dict[str, Any]]:
    with ThreadPoolExecutor(grader.workers) as pool:
        jobs = [pool.submit(grader.grade, each) for each in left]
        try:
            for job in as_completed(jobs):
                yield job.result()
        except BaseException:
            for job in jobs:
                job.cancel()
            for each in grader.started:
                each.stop()
            raise


def load_archives(folder: Path = make.OUT / "autograder") -> dict[str, dict[str, Any]]:
    """Return the private lists of all assignments, from what `make assignments` wrote.

    Args:
        folder: The folder with the archives.

    Raises:
        GradingError: There is none, or one that cannot be read.
    """
    paths = sorted(folder.glob("*.zip"))
    if not paths:
        raise GradingError("there is no archive to grade with: run 'make assignments' first")
    return {path.stem: _load(path) for path in paths}


def _load(path: Path) -> dict[str, Any]:
    try:
        # In one piece: what another process puts in its place meanwhile is for the next run.
        with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
            return json.loads(archive.read("assignment.json"))
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        why = " ".join(str(error).split())[:100] or type(error).__name__
        raise GradingError(f"{path} cannot be read ({why}): run 'make assignments' again") from None


def choose(archives: dict[str, dict[str, Any]], name: str | None) -> dict[str, Any]:
    """Return the list of the assignment that is to be graded.

    Args:
        archives: The lists of all.
        name: The assignment; None if there is only one.

    Raises:
        GradingError: There is none of this name, or several to choose from.
    """
    if name is None and len(archives) > 1:
        raise GradingError(f"name the assignment, ASSIGNMENT=... , one of {', '.join(archives)}")
    if name is not None and name not in archives:
        raise GradingError(f"no assignment '{name}': one of {', '.join(archives)} is needed")
    return archives[name or next(iter(archives))]


def main(argv: list[str] | None = None) -> int:
    """Run from the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("submissions", type=Path)
    parser.add_argument("out", type=Path, help="the CSV to write, and to go on from")
    parser.add_argument("--assignment", help="its name; not needed while there is only one")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--seed", type=int, default=0, help="decides the random instances")
    args = parser.parse_args(argv)
    try:
        archives = load_archives()
        archive = choose(archives, args.assignment)
        others = [each for each in archives.values() if each is not archive]
        options = {"others": others, "seed": args.seed, "workers": args.workers}
        grade_folder(args.submissions, args.out, archive, **options)
    except (GradingError, sources.SourceError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped; the same command goes on from here", file=sys.stderr)
        return 130
    print(f"Grades: {args.out}; written answers: {args.out.with_suffix('.written.md')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

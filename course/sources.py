"""Read the one source of an assignment, `assignments/NAME.py`.

A source is a script in cells, as VS Code, PyCharm, Spyder and jupytext read it: one file, in
which a question stands beside its solution, tests, rubric and the wrong answers students give.

    # %% assignment                     settings, as TOML in comments: title, the minutes that each
                                        question takes, withheld
    # %% [markdown]                     text for everybody
    # %%                                code for everybody
    # %% answer q1                      code with gaps between BEGIN SOLUTION and END SOLUTION
    # %% public q1                      assertions that students get; their messages help
    # %% hidden common                  what the hidden tests share
    # %% hidden q1 2: its title         a hidden test and its points (see hidden.py)
    # %% wrong q1 2: its title          a typical wrong answer, whole, and the points it loses
    # %% right q1: its title            another right answer: run after the solution, it must
                                        earn all points; it may answer several questions anew
    # %% [markdown] written w1 3        a written answer: model answer between BEGIN and END
                                        SOLUTION, rubric between BEGIN and END RUBRIC
    # %% [markdown] further             from here on questions are for those who want more, and its
                                        text says about what; what stands before is the core

Text asks a question q1 with the words **Question q1.**, to which its points and minutes are added.
The core takes 2 to 4 hours, and nothing in it may need what comes after it.

Why not otter-grader's own format: its hidden tests run in the submission's process, where an
answer can lie to them, and travel to every machine that grades; its student notebooks install
otter unpinned and expect a folder of tests beside them. The words BEGIN SOLUTION and END SOLUTION
are otter's, and students use otter itself.
"""

import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

CELL = re.compile(r"# %%(?P<markdown> \[markdown\])?(?P<words>.*)")
NAMED = re.compile(r"(?P<kind>answer|public|hidden|wrong|right|written) (?P<name>\w+)(?P<rest>.*)")
POINTS = re.compile(r" (?P<points>\d+(\.5)?)(: (?P<title>.+))?")
GAP = re.compile(
    r"^(?P<indent>[ \t]*)(?:# )?BEGIN SOLUTION\n(?P<inside>.*?)^[ \t]*(?:# )?END SOLUTION\n?",
    re.DOTALL | re.MULTILINE,
)
ASKED = re.compile(r"\*\*Question (\w+)\.\*\*")
LEAST_WRONG_ANSWERS = 3
CORE_MINUTES = (120, 240)


class SourceError(Exception):
    """A source that breaks the rules above; the message names file, line and remedy."""


@dataclass(frozen=True)
class Cell:
    """One cell of a source.

    Attributes:
        kind: "markdown", "code", "assignment", "answer", "public", "hidden", "wrong", "right",
            "written", "further".
        text: Its text, without the comment signs if it is Markdown.
        line: The line of its head.
        name: The question, or "common".
        points: Points it is worth or loses.
        title: What follows the points.
    """

    kind: str
    text: str = field(repr=False)
    line: int
    name: str = ""
    points: float = 0
    title: str = ""


@dataclass(frozen=True)
class Assignment:
    """An assignment as its source has it.

    Attributes:
        stem: The file's name without suffix.
        settings: Title, minutes of each question, withheld.
        cells: Its cells in order.
    """

    stem: str
    settings: dict
    cells: list[Cell] = field(repr=False)

    def of_kind(self, kind: str, name: str = "") -> list[Cell]:
        """Return the cells of a kind, of one question if it is named."""
        return [c for c in self.cells if c.kind == kind and name in ("", c.name)]

    @property
    def questions(self) -> dict[str, float]:
        """Points of each programming question, in order."""
        names = [cell.name for cell in self.of_kind("answer")]
        return {n: sum(c.points for c in self.of_kind("hidden", n)) for n in names}

    @property
    def written(self) -> dict[str, float]:
        """Points of each written answer, in order."""
        return {cell.name: cell.points for cell in self.of_kind("written")}

    @property
    def further(self) -> list[str]:
        """The questions and written answers that are not of the core, in order."""
        kinds = [cell.kind for cell in self.cells]
        after = self.cells[kinds.index("further") :] if "further" in kinds else []
        return [cell.name for cell in after if cell.kind in ("answer", "written")]

    @property
    def core(self) -> list[str]:
        """The questions and written answers of the assignment itself, in order."""
        asked = [cell.name for cell in self.cells if cell.kind in ("answer", "written")]
        return [name for name in asked if name not in self.further]

    def minutes(self, names: list[str]) -> int:
        """How long some of the questions take, in minutes."""
        return sum(self.settings["minutes"][name] for name in names)


def read(path: Path) -> Assignment:
    """Read a source and check that it is complete.

    Args:
        path: The file.

    Raises:
        SourceError: Something is missing or misspelt.
    """
    cells, settings = [], {}
    for line, head, body in _split(path.read_text(encoding="utf8")):
        try:
            cell = _cell(line, head, body)
            if cell.kind == "assignment":
                settings = tomllib.loads(cell.text)
        except (SourceError, tomllib.TOMLDecodeError) as error:
            raise SourceError(f"{path.name}, line {line}: {error}") from None
        cells.append(cell)
    assignment = Assignment(path.stem, settings, cells)
    problem = next(_problems(assignment), None)
    if problem:
        raise SourceError(f"{path.name}{problem}")
    return assignment


def _split(text: str) -> list[tuple[int, str, str]]:
    found: list[tuple[int, str, list[str]]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("# %%"):
            found.append((number, line, []))
        elif found:
            found[-1][2].append(line)
    return [(number, head, "\n".join(body).strip("\n") + "\n") for number, head, body in found]


def _cell(line: int, head: str, body: str) -> Cell:
    match = CELL.fullmatch(head)
    words = match["words"].strip() if match else "?"
    markdown = bool(match and match["markdown"])
    if markdown or words == "assignment":
        wrong = [row for row in body.splitlines() if not row.startswith("#")]
        if any(row.strip() for row in wrong):
            raise SourceError("a line of Markdown must start with '#'")
        body = re.sub(r"^# ?", "", body, flags=re.MULTILINE)
    if words in ("", "assignment") or (words == "further" and markdown):
        return Cell(words or ("markdown" if markdown else "code"), body, line)
    named = NAMED.fullmatch(words)
    if not named or markdown != (named["kind"] == "written"):
        raise SourceError(f"unknown kind of cell: '{head}'")
    kind, name = named["kind"], named["name"]
    if kind in ("answer", "public") or name == "common":
        return Cell(kind, body, line, name)
    if kind == "right":
        if not named["rest"].startswith(": "):
            raise SourceError(f"'{head}' needs a title, as in 'right {name}: title'")
        return Cell(kind, body, line, name, title=named["rest"][2:])
    points = POINTS.fullmatch(named["rest"])
    if not points or (kind != "written" and not points["title"]):
        raise SourceError(f"'{head}' needs points and a title, as in '{kind} {name} 2: title'")
    return Cell(kind, body, line, name, float(points["points"]), points["title"] or "")


def _problems(assignment: Assignment):
    if not {"title", "minutes"} <= set(assignment.settings):
        yield ": an assignment cell with title and minutes is missing"
    if not assignment.cells or [c.kind for c in assignment.cells[:2]] != ["assignment", "markdown"]:
        yield ": it must open with an assignment cell and a Markdown cell"
    names = [c.name for c in (*assignment.of_kind("answer"), *assignment.of_kind("written"))]
    for cell in assignment.cells:
        if cell.kind in ("answer", "written"):
            if names.count(cell.name) > 1:
                yield f", line {cell.line}: '{cell.name}' is used twice"
            if not GAP.search(cell.text):
                yield f", line {cell.line}: no gap between BEGIN SOLUTION and END SOLUTION"
        elif cell.name not in ("", "common", *names):
            yield f", line {cell.line}: there is no question '{cell.name}'"
        if cell.kind == "written" and "BEGIN RUBRIC\n" not in cell.text:
            yield f", line {cell.line}: no rubric between BEGIN RUBRIC and END RUBRIC"
        if cell.kind in ("markdown", "code") and "SOLUTION" in cell.text:
            yield f", line {cell.line}: this solution, outside of an answer, would be handed out"
    yield from _problems_of_time(assignment, names)
    for name, points in assignment.questions.items():
        for kind, least in (("public", 1), ("hidden", 1), ("wrong", LEAST_WRONG_ANSWERS)):
            if len(assignment.of_kind(kind, name)) < least:
                yield f": question '{name}' needs at least {least} cell(s) '{kind} {name}'"
        for cell in assignment.of_kind("wrong", name):
            if not 0 < cell.points <= points:
                yield f", line {cell.line}: it cannot lose {cell.points:g} of {points:g} points"


def _problems_of_time(assignment: Assignment, names: list[str]):
    minutes = assignment.settings["minutes"]
    if not isinstance(minutes, dict) or set(minutes) != set(names):
        yield f": minutes must name each of {', '.join(names)}, and no other"
        return
    if not all(type(each) is int and each > 0 for each in minutes.values()):
        yield ": minutes must be whole numbers above 0"
    text = [c for c in assignment.cells if c.kind in ("markdown", "further")]
    asked = [name for cell in text for name in ASKED.findall(cell.text)]
    if sorted(asked) != sorted(names):
        missing = sorted(set(names) ^ set(asked)) or sorted(asked)
        yield f": text must say '**Question NAME.**' once for each, look at {', '.join(missing)}"
    if len(assignment.of_kind("further")) > 1:
        yield f", line {assignment.of_kind('further')[1].line}: the second cell 'further'"
    total, (least, most) = assignment.minutes(assignment.core), CORE_MINUTES
    if not least <= total <= most:
        yield f": its core takes {total} minutes, but {least} to {most} are needed"

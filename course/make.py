"""Make what is handed out and what grades it, from the sources in `assignments/`.

python course/make.py [--out FOLDER] [--archives]

FOLDER/student/NAME.ipynb        for students; carries the book's package and the data it reads, so
                                 it opens in Colab and Jupyter and needs no other file
FOLDER/solution/NAME.ipynb       for instructors: the same, gaps filled, with rubrics
FOLDER/autograder/NAME.zip       for whoever grades: hidden tests, rubrics, the solution; with
                                 --archives nothing but these, which takes a second
"""

import argparse
import sys
from pathlib import Path

import reads
import sources
import views

sys.path.append(str(views.ROOT / "tools"))

import carrying
from book_sources import BookError

OUT = views.ROOT / "_build" / "assignments"


def make(source: Path, out: Path, data: list[str] | None = None) -> list[Path]:
    """Write the three files of one assignment; return their paths.

    Args:
        source: The assignment's source.
        out: The folder to write to.
        data: The data that the student's notebook carries, with the package; by default it
            carries neither, and installs.

    Raises:
        sources.SourceError: The source is not complete.
    """
    assignment = sources.read(source)
    student = views.notebook(assignment, solved=False)
    if data is not None:
        student = carrying.carry(student, carrying.pack(data))
    files = {
        f"student/{source.stem}.ipynb": views.as_file(student),
        f"solution/{source.stem}.ipynb": views.as_file(views.notebook(assignment, solved=True)),
    }
    for name, content in files.items():
        views.put(out / name, content)
    return [*(out / name for name in files), make_archive(source, out)]


def make_archive(source: Path, out: Path) -> Path:
    """Write what grades one assignment; return its path.

    Args:
        source: The assignment's source.
        out: The folder to write to.

    Raises:
        sources.SourceError: The source is not complete.
    """
    assignment = sources.read(source)
    files = {
        "assignment.json": views.as_file(views.autograder(assignment)),
        "solution.ipynb": views.as_file(views.notebook(assignment, solved=True)),
    }
    path = out / "autograder" / f"{source.stem}.zip"
    views.put(path, carrying.archive(files))
    return path


def _drop_others(out: Path, names: set[str]) -> None:
    """Remove what was made of sources that are gone, which nobody should hand out or grade with."""
    for folder, ending in (("student", "ipynb"), ("solution", "ipynb"), ("autograder", "zip")):
        for path in (out / folder).glob(f"*.{ending}"):
            if path.stem not in names:
                path.unlink(missing_ok=True)


def main(argv: list[str] | None = None) -> int:
    """Run from the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--archives", action="store_true", help="only what grading needs")
    args = parser.parse_args(argv)
    out = args.out
    chosen = sorted((views.ROOT / "assignments").glob("*.py"))
    _drop_others(out, {source.stem for source in chosen})
    problems = []
    for source in chosen:
        try:
            if args.archives:
                make_archive(source, out)
                continue
            data = reads.data_read(sources.read(source), out / ".reads")
            for path in make(source, out, data):
                print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
        except (sources.SourceError, BookError, OSError) as error:
            # One that is being written must not keep the others from being handed out.
            # A source's own error names it.
            whose = "" if isinstance(error, sources.SourceError) else f"{source.name}: "
            problems.append(f"{whose}{error}")
    if not args.archives:
        print("Hand out the folder 'student'; keep 'solution' and 'autograder' private.")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

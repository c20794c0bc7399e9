"""The assignments, one process that runs submissions, and the course's own environment."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "course"), str(ROOT / "tools"), str(Path(__file__).parent)]


@pytest.fixture(scope="session")
def assignments():
    """All assignments by name."""
    import sources
    from course_examples import SOURCES

    return {path.stem: sources.read(path) for path in SOURCES}


@pytest.fixture(scope="session")
def graders(assignments):
    """A grader for each assignment; the process behind each starts with its first submission."""
    import confine
    import grade
    import views
    from course_examples import LIMITS

    if confine.missing():  # said aloud: on such a system grading stops with the same words
        pytest.skip(f"grading needs {confine.missing()}")
    made = {
        name: grade.Grader(views.autograder(assignment), limits=LIMITS)
        for name, assignment in assignments.items()
    }
    yield made
    for each in made.values():
        each.__exit__()


@pytest.fixture(scope="session")
def course_python():
    """The interpreter of the environment that students have."""
    import project

    program = project.venv_program("python", project.course_folder())
    if not os.path.exists(program):
        pytest.fail("the course's environment is missing: run 'make env'", pytrace=False)
    return program

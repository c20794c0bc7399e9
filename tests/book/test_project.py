"""The commands fail with one line that says what to do, and repeat nothing that is done."""

import json
import os
import re
import subprocess
import sys

import project
import pytest
from small_books import ROOT


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The commands' module, pointed at an empty project in a folder with a space."""
    root = tmp_path / "a project"
    root.mkdir()
    (root / "constraints.txt").write_text("")
    (root / "pyproject.toml").write_text("")
    monkeypatch.setattr(project, "ROOT", str(root))
    # Otherwise an untested Python would add its warning to every line that is looked at.
    monkeypatch.setattr(project, "TESTED", (sys.version_info[:2],))
    for name in ("VENV", "STAMP", "UNFINISHED", "PIP_LOG"):
        old = getattr(project, name)
        monkeypatch.setattr(project, name, old.replace(str(ROOT), str(root)))
    return root


@pytest.fixture
def commands(monkeypatch):
    """What would have been run, instead of running it."""
    ran = []

    def run(command):
        ran.append(command)
        if "venv" in command:
            python = project.venv_program("python", command[-1])
            os.makedirs(os.path.dirname(python), exist_ok=True)
            open(python, "w").close()

    monkeypatch.setattr(project, "_run_logged", run)
    return ran


def _fails_in_one_line(capsys, *argv):
    assert project.main(list(argv)) == 1
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    return said


def test_old_python_is_refused():
    with pytest.raises(project.Stop, match=r"3\.10 is too old: install Python 3\.11"):
        project.check_python((3, 10, 4))


def test_untested_python_is_warned_about(capsys):
    project.check_python((3, 99, 0))
    assert "3.99 was not tested (tested: 3.11" in capsys.readouterr().err
    project.check_python((*project.TESTED[0], 0))
    assert capsys.readouterr().err == ""


def test_full_disk_is_named(elsewhere, commands, monkeypatch, capsys):
    usage = project.shutil.disk_usage(".")._replace(free=10**9)
    monkeypatch.setattr(project.shutil, "disk_usage", lambda path: usage)
    assert "Only 1.0 GB are free" in _fails_in_one_line(capsys, "env")
    assert commands == []


@pytest.mark.skipif(sys.platform != "linux", reason="torch for GPUs comes unasked on Linux only")
def test_tight_disk_is_warned_about(elsewhere, commands, monkeypatch, capsys):
    usage = project.shutil.disk_usage(".")._replace(free=5 * 10**9)
    monkeypatch.setattr(project.shutil, "disk_usage", lambda path: usage)
    assert project.main(["env"]) == 0
    assert "only 5.0 GB are free" in capsys.readouterr().err


def test_missing_venv_module_is_named(elsewhere, commands, monkeypatch, capsys):
    monkeypatch.setattr(project.importlib.util, "find_spec", lambda name: None)
    assert "apt-get install python3-venv" in _fails_in_one_line(capsys, "env")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("NewConnectionError: Failed to establish\nNo matching distribution", "No network"),
        ("[Errno -3] Temporary failure in name resolution", "No network"),
        ("OSError: [Errno 28] No space left on device", "disk filled up"),
        ("ERROR: No matching distribution found for torch==2.13.0", "does not exist for Python"),
        ("something else", "see the end of"),
    ],
)
def test_failed_installation_is_explained(text, word):
    line = project.installation_failure(text)
    assert word in line
    assert "\n" not in line


def test_real_installer_without_network(elsewhere, monkeypatch, capsys):
    # Nothing listens on port 9, so this is what an unplugged cable looks like to pip.
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    # The environment's own setuptools would satisfy the request.
    (elsewhere / "constraints.txt").write_text("setuptools==1.0\n")
    assert "No network" in _fails_in_one_line(capsys, "env")
    assert project.read_stamp() == {}


def test_environment_is_made_once(elsewhere, commands, capsys):
    assert project.main(["env"]) == 0
    assert any("venv" in command for command in commands)
    assert any(".[book,test]" in command for command in commands)
    commands.clear()
    assert project.main(["env"]) == 0
    assert commands == []
    assert "up to date" in capsys.readouterr().out


def test_peers_are_added_without_dependencies_and_once(elsewhere, commands):
    assert project.main(["env"]) == 0
    (command,) = [command for command in commands if "--target" in command]
    assert "--no-deps" in command
    assert command[command.index("--target") + 1] == project.peers_folder()
    assert all("==" in package for package in project.PEERS)
    os.remove(os.path.join(project.peers_folder(), "complete.txt"))
    commands.clear()
    project.add_peers()
    assert len(commands) == 1
    project.add_peers()
    assert len(commands) == 1


def test_course_has_an_environment_on_top_of_the_books_and_once(elsewhere, commands):
    assert project.main(["env"]) == 0
    course = project.course_folder()
    (made,) = [command for command in commands if "venv" in command and course in command]
    assert made[0] == project.venv_program("python")
    (command,) = [command for command in commands if project.COURSE[0] in command]
    assert command[0] == project.venv_program("python", course)
    (seen,) = (elsewhere / ".venv" / "course").rglob("book.pth")
    assert str(elsewhere / ".venv") in seen.read_text()
    os.remove(os.path.join(course, "complete.txt"))
    commands.clear()
    project.add_course()
    assert len(commands) == 2
    project.add_course()
    assert len(commands) == 2


def test_tests_do_not_start_without_the_course(elsewhere, commands, monkeypatch, capsys):
    assert project.main(["env"]) == 0
    os.remove(os.path.join(project.course_folder(), "complete.txt"))

    def no_network(command):
        raise project.Stop("No network while installing")

    monkeypatch.setattr(project, "_run_logged", no_network)
    monkeypatch.setattr(project, "run_in_environment", lambda *arguments: pytest.fail("it started"))
    capsys.readouterr()
    assert "No network" in _fails_in_one_line(capsys, "test")


@pytest.mark.parametrize(("outcomes", "status"), [((0, 0), 0), ((1, 0), 1), ((0, 1), 1)])
def test_the_book_is_built_before_the_tests_and_both_must_go_well(
    elsewhere, commands, monkeypatch, outcomes, status
):
    ran, left = [], list(outcomes)

    def run(*arguments, env=None):
        ran.append(arguments)
        return left.pop(0)

    monkeypatch.setattr(project, "run_in_environment", run)
    assert project.main(["test"]) == status
    built, tested = ran
    assert built[0].endswith("build_book.py")
    assert tested[:2] == ("-m", "pytest")
    # A book that does not build is built by the tests once more: not by two at a time.
    assert ("-n" in tested) == (outcomes[0] == 0)


def test_what_is_named_is_tested_alone(elsewhere, commands, monkeypatch):
    ran = []
    monkeypatch.setattr(project, "run_in_environment", lambda *given: ran.append(given) or 0)
    assert project.main(["test", "tests/test_spectra.py"]) == 0
    assert ran == [("-m", "pytest", "tests/test_spectra.py")]


@pytest.mark.parametrize("given", [(), ("SUBMISSIONS=here",), ("OUT=there.csv",)])
def test_make_grade_asks_for_what_it_needs(given):
    done = _make("grade", *given)
    assert done.returncode != 0
    assert done.stderr.startswith("Name both, as in 'make grade SUBMISSIONS=folder OUT=")


def test_environment_follows_its_lists(elsewhere, commands):
    project.make_environment(["book"])
    commands.clear()
    project.make_environment(["test"])
    assert any(".[book,test]" in command for command in commands)
    commands.clear()
    (elsewhere / "constraints.txt").write_text("numpy==2.0\n")
    project.make_environment(["book"])
    assert commands and not any("venv" in command for command in commands)


def test_killed_installation_starts_afresh(elsewhere, commands, monkeypatch):
    def killed(command):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(project, "_run_logged", killed)
        project.make_environment(["book"])
    half = elsewhere / ".venv" / "half of a package"
    half.touch()
    project.make_environment(["book"])
    assert not half.exists()
    assert project.read_stamp()["extras"] == ["book"]


def test_somebody_elses_environment_is_kept(elsewhere, commands):
    python = elsewhere / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    project.make_environment(["book"])
    assert python.exists()
    assert not any("venv" in command for command in commands)


def test_environment_of_another_python_is_replaced(elsewhere, commands):
    project.make_environment(["book"])
    with open(project.STAMP, "w") as handle:
        json.dump({"key": "old", "python": "3.0", "extras": ["book"]}, handle)
    commands.clear()
    project.make_environment(["book"])
    assert any("venv" in command for command in commands)


def test_serve_without_a_book(elsewhere, capsys):
    assert "run 'make book' first" in _fails_in_one_line(capsys, "serve")


def test_clean_removes_what_was_made(elsewhere):
    for name in ("_build", ".venv"):
        (elsewhere / name).mkdir()
    assert project.main(["clean"]) == 0
    assert project.main(["clean"]) == 0
    assert sorted(os.listdir(elsewhere)) == ["constraints.txt", "pyproject.toml"]


def _make(*arguments):
    # These tests may run under make themselves; its variables would change what the inner one says.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", *arguments]
    return subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True)


@pytest.mark.parametrize("python", ["no-such-python", "false"])
def test_make_names_a_python_that_does_not_do(python):
    done = _make("book", f"PYTHON={python}")
    assert done.returncode != 0
    first, *rest = done.stderr.strip().splitlines()
    assert "install Python 3.11 or newer" in first
    # The only other line is make's own.
    assert all(line.startswith("make:") for line in rest)


def test_make_offers_every_command():
    offered = _make("help").stdout
    for command in ("book", "test", "bench", "serve", "assignments", "grade", "clean"):
        assert f"make {command}" in offered


def test_versions_are_pinned_without_index_hash_or_build():
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert not any(line.startswith("lowgrad") for line in lines)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems add packages of their own")
def test_everything_installed_is_pinned():
    frozen = subprocess.run(
        [sys.executable, "-m", "pip", "freeze", "--exclude-editable"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    pinned = (ROOT / "constraints.txt").read_text().lower().replace("_", "-").splitlines()
    for line in frozen.splitlines():
        if not line.startswith("#"):
            assert line.partition("+")[0].lower().replace("_", "-") in pinned

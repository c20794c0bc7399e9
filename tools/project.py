"""The project's commands, with nothing needed but a Python and its standard library.

    python tools/project.py book     environment, execution, pages; prints where to open them
    python tools/project.py test     environment, book, all tests
    python tools/project.py bench    environment, benchmarks
    python tools/project.py serve    the book on a local address
    python tools/project.py assignments    notebooks for students, solutions, what grades them
    python tools/project.py grade FOLDER TABLE.csv    grades a folder of submissions
    python tools/project.py colab    chapters that carry the package and run anywhere
    python tools/project.py try-colab    runs them with packages such as Colab has
    python tools/project.py address ADDRESS --tag TAG    sets where the book is published
    python tools/project.py env      the environment alone
    python tools/project.py clean    removes the environment and everything that was built

What has been done already is found and not repeated. Every failure ends with one line that
says what to do.
"""

# The syntax stays that of Python 3.6, so that a Python that is too old reaches the line which
# says so.

import argparse
import functools
import hashlib
import http.server
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time

OLDEST = (3, 11)
TESTED = ((3, 11), (3, 13))
NEEDED_GB = 3
# What tests and benchmarks compare with, and all that it imports beside the environment's own
# packages. Left to itself it would bring another torch, and torchvision, which does not import
# beside the pinned one: hence without dependencies, and into a folder of its own, since torch
# contracts in another order as soon as it finds opt-einsum beside it.
PEERS = (
    "backpack-for-pytorch==1.7.1",
    "curvlinops-for-pytorch==3.0.1",
    "einconv==0.1.0",
    "einops==0.8.2",
    "hessian-eigenthings==1.0.0a5",
    "linear-operator==0.6.1",
    "opt-einsum==3.4.0",
    "PyHessian==0.1",
)
# What students install, tried out in an environment of its own on top of the book's: otter brings
# two dozen packages that no page of the book may come to depend on.
COURSE = ("otter-grader==7.0.0", "ipykernel>=6.29")
# Colab's packages, in an environment that shares nothing with the book's.
COLAB = os.path.join("tools", "colab_packages.txt")
# On Linux the installer takes torch for GPUs unless it is told where the small build lies.
NEEDED_WITH_GPU_GB = 8
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
STAMP = os.path.join(VENV, "companion-ready.json")
UNFINISHED = os.path.join(VENV, "companion-unfinished")
PIP_LOG = os.path.join(VENV, "companion-pip.log")
# What pip writes when it reaches nobody, in the words of urllib3 and of the systems below it.
NO_NETWORK = (
    "NewConnectionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ProxyError",
    "NameResolutionError",
    "Temporary failure in name resolution",
    "Name or service not known",
    "nodename nor servname",
    "getaddrinfo failed",
    "Network is unreachable",
    "Connection refused",
    "Connection reset",
    "Connection broken",
    "Read timed out",
)
NO_SPACE = ("No space left on device", "Errno 28", "Disk quota exceeded")


class Stop(Exception):
    """A failure that is told in one line."""


def check_python(version=None):
    """Stop at a Python that is too old and warn about one that nobody tested.

    Args:
        version: The (major, minor, ...) to judge; by default the one that runs this.

    Raises:
        Stop: The version is older than `OLDEST`.
    """
    version = tuple((version or sys.version_info)[:2])
    if version < OLDEST:
        raise Stop(
            f"Python {_dotted(version)} is too old: install Python {_dotted(OLDEST)} or newer "
            f"and name it, as in 'make book PYTHON=python{_dotted(OLDEST)}'"
        )
    if version not in TESTED:
        print(
            f"Warning: Python {_dotted(version)} was not tested (tested: {_tested()}); "
            "if something fails, use a tested one",
            file=sys.stderr,
        )


def _dotted(version):
    return ".".join(str(part) for part in version)


def _tested():
    return ", ".join(_dotted(version) for version in TESTED)


def check_space():
    """Stop when the disk has less room than the environment needs, warn when it is tight.

    Raises:
        Stop: Fewer than `NEEDED_GB` GB are free where the environment goes.
    """
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < NEEDED_GB:
        raise Stop(f"Only {free:.1f} GB are free in {ROOT}: make room, {NEEDED_GB} GB are needed")
    if sys.platform == "linux" and free < NEEDED_WITH_GPU_GB and not os.path.isdir(VENV):
        print(
            f"Warning: only {free:.1f} GB are free in {ROOT}; torch for GPUs does not fit "
            f"({NEEDED_WITH_GPU_GB} GB in all), README.md says how to get the small build",
            file=sys.stderr,
        )


def venv_program(name, folder=None):
    """Return the path of a program of an environment (by default the book's), on any system."""
    if os.name == "nt":
        return os.path.join(folder or VENV, "Scripts", name + ".exe")
    return os.path.join(folder or VENV, "bin", name)


def environment_key():
    """Return a digest of everything that decides what the environment holds."""
    # An environment that was moved or copied holds the old path in its programs.
    total = hashlib.sha256(f"{sys.version_info[:3]} {ROOT}".encode())
    for name in ("constraints.txt", "pyproject.toml"):
        with open(os.path.join(ROOT, name), "rb") as handle:
            total.update(handle.read())
    return total.hexdigest()


def read_stamp():
    """Return what the last finished installation left: key, Python's version, extras."""
    try:
        with open(STAMP, encoding="utf8") as handle:
            stamp = json.load(handle)
    except (OSError, ValueError):
        return {}
    whole = os.path.exists(venv_program("python")) and not os.path.exists(UNFINISHED)
    return stamp if whole else {}


def make_environment(extras):
    """Create or complete the project's own environment; quick when there is nothing to do.

    Args:
        extras: Names of optional dependencies of pyproject.toml.

    Raises:
        Stop: It cannot be made; the message says what to do.
    """
    stamp = read_stamp()
    if stamp.get("key") == environment_key() and set(extras) <= set(stamp["extras"]):
        print("Environment: up to date")
        return
    check_space()
    if importlib.util.find_spec("ensurepip") is None:
        raise Stop(
            "This Python cannot make environments: install its venv module "
            "(on Debian: apt-get install python3-venv)"
        )
    start = time.time()
    wanted = sorted(set(extras) | set(stamp.get("extras", [])))
    print(
        "Environment: installing lowgrad-utils[{}] into {} (some minutes the first time)".format(
            ",".join(wanted), VENV
        ),
        flush=True,
    )
    _create_venv(stamp.get("python", _dotted(sys.version_info[:2])))
    # The build tool comes first and from the same list, so that no part of the environment is
    # left to what happens to be newest today.
    _pip("setuptools")
    _pip("--no-build-isolation", "--editable", ".[{}]".format(",".join(wanted)))
    with open(STAMP + ".part", "w", encoding="utf8") as handle:
        python = _dotted(sys.version_info[:2])
        json.dump({"key": environment_key(), "python": python, "extras": wanted}, handle)
    # From here on the environment counts: nothing may come after these two lines.
    os.replace(STAMP + ".part", STAMP)
    os.remove(UNFINISHED)
    print(f"Environment: ready after {time.time() - start:.0f} s", flush=True)


def peers_folder():
    """Return the folder of the packages that are compared with, for the path of one process."""
    return os.path.join(VENV, "peers")


def add_peers():
    """Put the packages that are compared with beside the environment; quick when they are there.

    Raises:
        Stop: They cannot be installed; the message says what to do.
    """
    folder, wanted = peers_folder(), environment_key() + " " + " ".join(PEERS)
    stamp = os.path.join(folder, "complete.txt")
    if os.path.exists(stamp):
        with open(stamp, encoding="utf8") as handle:
            if handle.read() == wanted:
                return
    print("Environment: installing what is compared with", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    _pip("--no-deps", "--target", folder, *PEERS)
    os.makedirs(folder, exist_ok=True)
    with open(stamp, "w", encoding="utf8") as handle:
        handle.write(wanted)


def course_folder():
    """Return the folder of the environment in which notebooks run as students have them."""
    return os.path.join(VENV, "course")


def add_course():
    """Make the environment of the course on top of the book's; quick when it is there.

    Raises:
        Stop: It cannot be made; the message says what to do.
    """
    folder, wanted = course_folder(), environment_key() + " " + " ".join(COURSE)
    stamp = os.path.join(folder, "complete.txt")
    if os.path.exists(stamp):
        with open(stamp, encoding="utf8") as handle:
            if handle.read() == wanted:
                return
    print("Environment: installing what the course needs", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    _run_logged([venv_program("python"), "-m", "venv", folder])
    # It sees the book's packages behind its own, so that torch is not installed a second time;
    # its installer writes to its own folder only.
    own, book = _packages_of(folder), _packages_of(VENV)
    os.makedirs(own, exist_ok=True)
    with open(os.path.join(own, "book.pth"), "w", encoding="utf8") as handle:
        handle.write(f"import site; site.addsitedir({book!r})\n")
    _pip(*COURSE, python=venv_program("python", folder))
    with open(stamp, "w", encoding="utf8") as handle:
        handle.write(wanted)


def colab_folder(torch):
    """Return the environment that has Colab's packages and one version of torch."""
    return os.path.join(VENV, "colab-torch-" + torch)


def add_colab(torch):
    """Make an environment of Colab's kind; quick when it is there.

    Args:
        torch: The version of torch. Of most versions there is only a build for GPUs, of some GB.

    Raises:
        Stop: It cannot be made; the message says what to do.
    """
    if not re.fullmatch(r"\d+(\.\d+)+", torch):
        raise Stop(f"'{torch}' is no version of torch: give one such as 2.6.0")
    folder = colab_folder(torch)
    with open(os.path.join(ROOT, COLAB), encoding="utf8") as handle:
        wanted = f"{sys.version_info[:3]} {ROOT} torch=={torch}\n{handle.read()}"
    stamp = os.path.join(folder, "complete.txt")
    if os.path.exists(stamp):
        with open(stamp, encoding="utf8") as handle:
            if handle.read() == wanted:
                return
    print(f"Environment: installing Colab's packages with torch {torch}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    _run_logged([sys.executable, "-m", "venv", folder])
    python = venv_program("python", folder)
    # A tenth of what is there is ever imported; the rest need not be compiled.
    install = (python, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile")
    _run_logged([*install, "--no-deps", "--requirement", COLAB])
    _run_logged([*install, f"torch=={torch}"])
    with open(stamp, "w", encoding="utf8") as handle:
        handle.write(wanted)


def _packages_of(folder):
    if os.name == "nt":
        return os.path.join(folder, "Lib", "site-packages")
    return os.path.join(folder, "lib", "python" + _dotted(sys.version_info[:2]), "site-packages")


def _create_venv(python_before):
    # A kill while packages are written leaves halves that pip takes for whole ones. The mark
    # tells such a folder from one that somebody else made, which is completed, never removed.
    if os.path.exists(UNFINISHED):
        print("Environment: an earlier installation was interrupted, starting afresh")
        shutil.rmtree(VENV)
    elif python_before != _dotted(sys.version_info[:2]):
        print(f"Environment: it was made with Python {python_before}, starting afresh")
        shutil.rmtree(VENV)
    if os.path.exists(STAMP):
        os.remove(STAMP)
    os.makedirs(VENV, exist_ok=True)
    open(UNFINISHED, "w").close()
    if not os.path.exists(venv_program("python")):
        _run_logged([sys.executable, "-m", "venv", VENV])


def _pip(*arguments, python=None):
    python = python or venv_program("python")
    _run_logged(
        [
            *(python, "-m", "pip", "install", "--disable-pip-version-check"),
            *("--progress-bar", "off", "--constraint", "constraints.txt", *arguments),
        ]
    )


def _run_logged(command):
    start = time.time()
    with open(PIP_LOG, "w", encoding="utf8") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        while True:
            try:
                status = process.wait(timeout=30)
                break
            except subprocess.TimeoutExpired:
                print(f"  still installing after {time.time() - start:.0f} s", flush=True)
    if status:
        with open(PIP_LOG, encoding="utf8", errors="replace") as log:
            text = log.read()
        # What is left says little by itself, so it stays for reading; the mark stays as well.
        raise Stop(installation_failure(text))


def installation_failure(text):
    """Return the one line that says why an installation failed and what to do about it.

    Args:
        text: What the installer wrote.
    """
    if any(word in text for word in NO_SPACE):
        return f"The disk filled up while installing: make room ({NEEDED_GB} GB) and repeat"
    if any(word in text for word in NO_NETWORK):
        return "No network while installing: connect (or set pip's proxy or index) and repeat"
    if "No matching distribution" in text or "Requires-Python" in text:
        return (
            f"A pinned package does not exist for Python {_dotted(sys.version_info[:2])} here "
            f"(tested: {_tested()}): see {PIP_LOG}"
        )
    return f"Installing failed: see the end of {PIP_LOG}"


def run_in_environment(*arguments, **options):
    """Run the environment's Python in the project's folder and return its exit status."""
    command = [venv_program("python"), *list(arguments)]
    return subprocess.call(command, cwd=ROOT, **options)


def book():
    """Make the environment, execute and build the book; return the exit status."""
    make_environment(["book"])
    return run_in_environment(os.path.join("tools", "build_book.py"))


def test(arguments):
    """Make the environment with what tests need, run them; return the exit status.

    All of them run in two processes, each of which takes whole files; what is named is left to
    pytest alone.
    """
    make_environment(["book", "test"])
    add_peers()
    add_course()
    if arguments:
        return run_in_environment("-m", "pytest", *arguments)
    # First: a book that is built beside the tests would take longer than its notebooks may.
    built = run_in_environment(os.path.join("tools", "build_book.py"))
    if built:
        # The tests try to build it again, which two processes must not do at once.
        run_in_environment("-m", "pytest")
        return built
    one_thread = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
    whole_files = ("-n", "2", "--dist", "loadfile")
    return run_in_environment("-m", "pytest", *whole_files, env={**os.environ, **one_thread})


def bench(arguments):
    """Make the environment and run the benchmarks; return the exit status."""
    make_environment(["book"])
    add_peers()
    scripts = (os.path.join("benchmarks", name) for name in ("run.py", "curvature.py"))
    return max(run_in_environment(script, *arguments) for script in scripts)


def assignments():
    """Make what is handed out to students and what grades it; return the exit status."""
    make_environment(["book"])
    return run_in_environment(os.path.join("course", "make.py"))


def grade(arguments):
    """Grade a folder of submissions with archives made just now; return the exit status.

    Raises:
        Stop: It is not said which assignment, or which there is none of.
    """
    check_grading(arguments)
    make_environment(["book"])
    # Archives that are older than their sources would grade by yesterday's tests.
    status = run_in_environment(os.path.join("course", "make.py"), "--archives")
    return status or run_in_environment(os.path.join("course", "grade.py"), *arguments)


def check_grading(arguments):
    """Stop before anything is made if the arguments cannot be graded by.

    Args:
        arguments: Those of course/grade.py, which says what they mean.

    Raises:
        Stop: The assignment is not named, or there is none of that name, or no such folder.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("submissions")
    parser.add_argument("out")
    parser.add_argument("--assignment")
    given = parser.parse_known_args(arguments)[0]
    names = os.listdir(os.path.join(ROOT, "assignments"))
    known = sorted(name[: -len(".py")] for name in names if name.endswith(".py"))
    if given.assignment is None and len(known) > 1:
        raise Stop("Name the assignment, ASSIGNMENT=... , one of " + ", ".join(known))
    if given.assignment is not None and given.assignment not in known:
        raise Stop(f"No assignment '{given.assignment}': one of {', '.join(known)} is needed")
    if not os.path.isdir(os.path.join(ROOT, given.submissions)):
        raise Stop(f"No folder {given.submissions}: name the one with the submissions")


def colab(arguments):
    """Write chapters that carry the package; return the exit status."""
    make_environment(["book"])
    return run_in_environment(os.path.join("tools", "colab.py"), *arguments)


def try_colab(arguments):
    """Run those chapters in an environment of Colab's kind; return the exit status."""
    make_environment(["book"])
    return run_in_environment(os.path.join("tools", "try_colab.py"), *arguments)


def address(arguments):
    """Set, change or remove the repository's address; return the exit status."""
    # It needs nothing but a Python, so that it works before there is an environment.
    script = os.path.join(ROOT, "tools", "address.py")
    return subprocess.call([sys.executable, script, *arguments])


def serve(port):
    """Serve the built book on this machine until interrupted; return the exit status.

    Raises:
        Stop: There is no book yet, or the port is taken.
    """
    html = os.path.join(ROOT, "_build", "html")
    if not os.path.exists(os.path.join(html, "index.html")):
        raise Stop("There is no book yet: run 'make book' first")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=html)
    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    except OSError as error:
        raise Stop(f"Port {port} cannot be used ({error}): choose another with --port") from None
    print(f"The book is at http://127.0.0.1:{server.server_port}/ (Ctrl-C ends this)")
    server.serve_forever()
    return 0


def clean():
    """Remove the environment and everything that was built; return the exit status."""
    for path in (os.path.join(ROOT, "_build"), VENV):
        if os.path.isdir(path):
            print(f"Removing {path}")
            shutil.rmtree(path)
    return 0


def main(argv=None):
    """Run one command; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    alone = ("env", "book", "serve", "assignments", "clean")
    with_arguments = ("test", "bench", "grade", "colab", "try-colab", "address")
    parser.add_argument("command", choices=alone + with_arguments)
    parser.add_argument("--port", type=int, default=8000, help="for serve")
    args, more = parser.parse_known_args(argv)
    if more and args.command not in with_arguments:
        parser.error("unknown arguments: " + " ".join(more))
    commands = {
        "env": lambda: make_environment(["book", "test"]) or add_peers() or add_course(),
        "book": book,
        "test": lambda: test(more),
        "bench": lambda: bench(more),
        "serve": lambda: serve(args.port),
        "assignments": assignments,
        "grade": lambda: grade(more),
        "colab": lambda: colab(more),
        "try-colab": lambda: try_colab(more),
        "address": lambda: address(more),
        "clean": clean,
    }
    try:
        if args.command not in ("serve", "clean"):
            check_python()
        return commands[args.command]() or 0
    except Stop as failure:
        print(failure, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

"""The process in which submissions run: it knows no test and no expected value.

    python -I -B course/runner.py PACKAGE_FOLDER DATA_FOLDER WITHHELD_NAMES...

and then one job a line on standard input.

The libraries are imported once; each job is then a copy of this process (a fork) that confines
itself to one folder, runs the notebook found there, calls its functions with the arguments found
there, and writes what they return, as plain values, into `answers.jsonl`. Meanwhile this process
watches the copy's time, memory and files, and tells in one line of JSON how it ended.

A copy that lies can only lie about its own answers: those are compared elsewhere.
"""

import contextlib
import importlib
import io
import json
import os
import re
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import confine
import plain
import withheld

NOTEBOOK, CALLS, ANSWERS, LOG = "submission.ipynb", "calls.json", "answers.jsonl", "output.log"
#: The first line of the cell that writes the public tests; graded is without them.
SETUP_MARK = "# @title Setup"
LIBRARIES = ("numpy", "scipy.linalg", "pandas", "torch", "matplotlib.pyplot", "lowgrad_utils")
MANY_FILES = 200
MANY_THREADS = 64
LOOK = 0.05
STOPPED = "stopped after"


class TooLong(BaseException):
    """A cell or a call took longer than it may; no `except Exception` catches it."""


class TooMuchOutput(BaseException):
    """Something printed more than anybody will read."""


# --- in the copy -------------------------------------------------------------------------------


def run_job(folder: str, limits: dict[str, Any], readable: list[str]) -> None:
    """Run the submission in `folder`, write its answers there, and end this process."""
    confine.die_with_parent()
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(os.path.join(folder, LOG), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.closerange(3, 256)
    os.chdir(folder)
    os.environ.update(HOME=folder, TMPDIR=folder, MPLCONFIGDIR=folder)
    used = _status_bytes("self", "VmData")
    confine.confine(
        folder,
        readable,
        data=used + limits["memory"],
        seconds=int(limits["seconds"]) + 5,
        file_size=limits["output"],
    )
    _Job(folder, limits).run()
    # Threads, and what was registered to run at the end, must not keep the process alive.
    os._exit(0)


class _Job:
    def __init__(self, folder: str, limits: dict[str, Any]):
        self.folder, self.limits = folder, limits
        self.answers = os.path.join(folder, ANSWERS)
        with open(os.path.join(folder, CALLS), encoding="utf8") as handle:
            self.calls = json.load(handle)
        signal.signal(signal.SIGALRM, _too_long)

    def run(self) -> None:
        namespace = _namespace()
        for number, source in self._cells():
            problem = self._try(self.limits["cell"], exec_cell, source, namespace)[1]
            if problem:
                self._write(cell=number, problem=problem)
        endless: dict[str, str] = {}
        for index, wanted in enumerate(self.calls):
            value, problem = None, endless.get(wanted["name"], "")
            if not problem:
                value, problem = self._try(self.limits["call"], _answer, wanted, namespace)
            if problem.startswith(STOPPED):
                # Its other calls would take as long, and the questions behind it come too late.
                endless[wanted["name"]] = problem
            self._write(call=index, **({"problem": problem} if problem else {"value": value}))
        self._write(done=True)

    def _cells(self) -> list[tuple[int, str]]:
        with open(os.path.join(self.folder, NOTEBOOK), encoding="utf8") as handle:
            return list(enumerate_code(json.load(handle)))

    def _try(self, seconds: float, function: Any, *arguments: Any) -> tuple[Any, str]:
        """Return what a function gives, or None and what went wrong, in one line."""
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        try:
            with contextlib.redirect_stdout(_Printed()), contextlib.redirect_stderr(_Printed()):
                return function(*arguments), ""
        except TooLong:
            return None, f"{STOPPED} {seconds:g} s"
        except TooMuchOutput:
            return None, "stopped because it printed too much"
        except MemoryError:
            return None, "stopped because it needed too much memory"
        except plain.NotPlain as error:
            return None, f"it returned {error}"
        except BaseException as error:
            return None, _one_line(error)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _write(self, **line: Any) -> None:
        # Opened anew each time: what is written is there, however this process ends.
        with open(self.answers, "a", encoding="utf8") as handle:
            handle.write(json.dumps(line) + "\n")


def _too_long(*_: Any) -> None:
    raise TooLong


class _Printed(io.TextIOBase):
    """Takes what is printed, forgets it, and stops whoever prints without end."""

    def __init__(self):
        self.left = 1_000_000

    def write(self, text: str) -> int:
        self.left -= len(text)
        if self.left < 0:
            raise TooMuchOutput
        return len(text)


def _one_line(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except BaseException:
        text = ""
    if isinstance(error, PermissionError):
        text += " (files elsewhere, processes and the network are closed here)"
    return f"{type(error).__name__[:60]}: {text[:200]}".rstrip(": ")


def enumerate_code(notebook: dict[str, Any]) -> Any:
    """Yield number and source of each code cell, without the one that sets up the tests."""
    for number, cell in enumerate(notebook["cells"], 1):
        source = cell["source"]
        source = source if isinstance(source, str) else "".join(source)
        if cell["cell_type"] == "code" and not source.startswith(SETUP_MARK):
            yield number, source


def exec_cell(source: str, namespace: dict[str, Any]) -> None:
    """Run one cell as a notebook would, without its commands to the notebook itself."""
    lines = source.splitlines()
    if lines and lines[0].startswith("%%"):
        if not re.match(r"%%(time|timeit|capture)\b", lines[0]):
            return
        lines = lines[1:]
    lines = [re.sub(r"^(\s*)[%!].*", r"\1pass", line) for line in lines]
    exec(compile("\n".join(lines), "<cell>", "exec"), namespace)


def _tensors(value: Any) -> Any:
    """Return a plain value with its arrays as tensors, also those in dictionaries."""
    import torch

    if isinstance(value, dict):
        return {key: _tensors(each) for key, each in value.items()}
    return torch.as_tensor(value) if hasattr(value, "shape") else value


def _answer(wanted: dict[str, Any], namespace: dict[str, Any]) -> Any:
    """Return the plain form of a variable, or of what a function gives for given arguments."""
    name = wanted["name"]
    if name not in namespace:
        raise NameError(f"{name} is not defined")
    value = namespace[name]
    if wanted["arguments"] is not None:
        value = value(**_tensors(plain.decode(wanted["arguments"])))
    return plain.encode(value)


class _Nothing:
    """Stands for what a notebook uses elsewhere and cannot use here: it takes any call, in vain."""

    def __getattr__(self, name: str) -> "_Nothing":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "_Nothing":
        return self


def _anything(attribute: str) -> _Nothing:
    # Who looks through all modules, as torch's optimisers do, must not take this for a file.
    if attribute.startswith("__"):
        raise AttributeError(attribute)
    return _Nothing()


def _namespace() -> dict[str, Any]:
    for name in ("otter", "google", "google.colab"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__getattr__ = _anything
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    # What a notebook has without importing it. Public tests are not run again here.
    module.__dict__.update(grader=_Nothing(), display=_Nothing())
    return module.__dict__


# --- in the process that watches ---------------------------------------------------------------


def watch(child: int, folder: str, limits: dict[str, Any]) -> str:
    """Wait until a copy of this process ends, or end it; return how it ended, in one word.

    Args:
        child: Its process id.
        folder: The folder it writes to.
        limits: seconds, memory (bytes beyond what the libraries take) and output (bytes).

    Returns:
        "ended", "time", "memory", "output" or "processes": which limit it met, if any.
    """
    end, parent = time.monotonic() + limits["seconds"], os.getppid()
    memory = _status_bytes("self", "VmRSS") + limits["memory"]
    verdict, looks = "ended", 0
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        looks += 1
        if time.monotonic() > end:
            verdict = "time"
        elif _status_bytes(child, "VmRSS") > memory:
            verdict = "memory"
        elif _status_number(child, "Threads") > MANY_THREADS:
            verdict = "processes"
        elif looks % 5 == 0 and _too_many_files(folder, 2 * limits["output"]):
            verdict = "output"
        if os.getppid() != parent:
            # Nobody waits for the answers any more; the copy ends together with this process.
            os._exit(1)
        if verdict != "ended":
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return verdict
        time.sleep(LOOK)
    return "output" if _too_many_files(folder, 2 * limits["output"]) else "ended"


def _status_number(process: int | str, field: str) -> int:
    try:
        with open(f"/proc/{process}/status", encoding="utf8") as handle:
            found = re.search(rf"^{field}:\s+(\d+)", handle.read(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def _status_bytes(process: int | str, field: str) -> int:
    return 1024 * _status_number(process, field)


def _too_many_files(folder: str, most: int) -> bool:
    count = total = 0
    for where, folders, files in os.walk(folder):
        count += len(folders) + len(files)
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(where, name)).st_blocks * 512
        if count > MANY_FILES or total > most:
            return True
    return False


def _try_confining(readable: list[str]) -> str:
    """Confine a copy of this process that does nothing; return what went wrong, empty if nothing.

    A submission's copy could not tell: the submission might then say the same.
    """
    read, write = os.pipe()
    if os.fork() == 0:
        problem = ""
        try:
            confine.confine(os.getcwd(), readable, data=2**40, seconds=9, file_size=9)
        except BaseException as error:
            problem = _one_line(error) or "unknown"
        os.write(write, problem.encode()[:1000])
        os._exit(0)
    os.wait()
    os.close(write)
    with os.fdopen(read, encoding="utf8") as handle:
        return handle.read()


def serve(package: Path, data: str, names: list[str]) -> None:
    """Import the libraries, then run the jobs that arrive, one a line, until there are no more.

    Args:
        package: The folder of the package.
        data: The folder of its data.
        names: The functions and classes of the package that submissions do without.
    """
    readable = [data, *withheld.readable_files(package)]
    withheld.install(package, names)
    for name in LIBRARIES:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    # Reports go where no library prints.
    channel = os.fdopen(os.dup(1), "w", encoding="utf8")
    os.dup2(2, 1)
    print(json.dumps({"problem": _try_confining(readable)}), file=channel, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            try:
                run_job(job["folder"], job["limits"], readable)
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(3)
        how = watch(child, job["folder"], job["limits"])
        print(json.dumps({"how": how}), file=channel, flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])

"""Run the notebooks that carry the package as a reader in Colab would.

    python tools/try_colab.py [--torch 2.13.0] [--python PYTHON] [CHAPTER ...]

Each runs from its first cell to its last in an empty folder, with a live kernel, in an environment
that has Colab's packages and neither the book's nor lowgrad_utils; numpy and torch are imported
before its first cell. Then every slider is moved to its end and back. What ran well is not run
again while notebook and environment are the same.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import address
import colab
import nbformat
import project
from book_sources import BookError
from carrying import ROOT
from execute import CELL_TIMEOUT, START_ATTEMPTS, Progress, describe_failure
from nbclient import NotebookClient
from tqdm import tqdm

KERNEL = "lowgrad-colab"
TORCH = "2.13.0"
FIRST = "import numpy, torch"
#: Moves each control to its last value and back, and says what was used.
LAST = """
import json, sys
import ipywidgets, lowgrad_utils, numpy, torch
from ipywidgets.widgets import widget
problems = []
shown = get_ipython().showtraceback
get_ipython().showtraceback = lambda *a, **k: problems.append(repr(sys.exc_info()[1]))
made = getattr(widget, "_instances", None)
controls = [
    each for each in list((ipywidgets.Widget.widgets if made is None else made).values())
    if isinstance(each, (ipywidgets.SelectionSlider, ipywidgets.Dropdown))
]
for control in controls:
    before = control.value
    for position in (len(control.options) - 1, 0):
        control.value = control.options[position][1]
    control.value = before
get_ipython().showtraceback = shown
if problems:
    raise RuntimeError("a slider failed: " + "; ".join(problems))
print(json.dumps({
    "package": lowgrad_utils.__file__, "torch": torch.__version__, "numpy": numpy.__version__,
    "ipywidgets": ipywidgets.__version__, "controls": len(controls),
}))
"""
DROPPED = ("PYTHONPATH", "PYTHONHOME", "LOWGRAD_BOOK", "LOWGRAD_READS", "LOWGRAD_DATA")


def run_alone(path: Path, python: str, cell_timeout: int = CELL_TIMEOUT) -> dict:
    """Run one notebook with another Python, in an empty folder; return how it went.

    Args:
        path: The notebook.
        python: The Python of an environment with ipykernel.
        cell_timeout: Seconds after which a cell counts as failed.

    Returns:
        ``seconds``, ``failure`` (empty if it went well), and what the last cell said.
    """
    start = time.monotonic()
    for attempt in range(1, START_ATTEMPTS + 1):
        notebook, progress = nbformat.read(path, as_version=4), Progress()
        notebook.cells.append(nbformat.v4.new_code_cell(LAST))
        with tempfile.TemporaryDirectory() as beside:
            _write_kernel(Path(beside, "jupyter"), python)
            work = Path(beside, "empty")
            work.mkdir()
            try:
                _client(notebook, work, progress, cell_timeout).execute(env=_environment(beside))
                break
            # Whatever stops one notebook must not hide others' failures.
            except Exception as error:
                never_began = isinstance(error, RuntimeError) and progress.index is None
                if never_began and attempt < START_ATTEMPTS:
                    continue
                why = describe_failure(path.stem, notebook, progress.index, error)
                return {"seconds": time.monotonic() - start, "failure": why}
    said = notebook.cells[-1].outputs[-1]["text"].splitlines()[-1]
    return {"seconds": time.monotonic() - start, "failure": "", **json.loads(said)}


def _write_kernel(folder: Path, python: str) -> None:
    spec = folder / "kernels" / KERNEL / "kernel.json"
    spec.parent.mkdir(parents=True)
    argv = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    text = json.dumps({"argv": argv, "display_name": "Colab's kind", "language": "python"})
    spec.write_text(text, encoding="utf8")
    os.environ["JUPYTER_PATH"] = str(folder)


def _environment(beside: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in DROPPED}
    # What a notebook unpacks must go into a folder that is removed with everything else.
    temporary = Path(beside, "tmp")
    temporary.mkdir()
    return {**kept, "TMPDIR": str(temporary), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}


def _client(
    notebook: nbformat.NotebookNode, folder: Path, progress: Progress, cell_timeout: int
) -> NotebookClient:
    return NotebookClient(
        notebook,
        timeout=cell_timeout,
        record_timing=False,
        coalesce_streams=True,
        kernel_name=KERNEL,
        extra_arguments=["--IPKernelApp.log_level=ERROR", f"--IPKernelApp.exec_lines={FIRST}"],
        resources={"metadata": {"path": str(folder)}},
        on_cell_execute=progress.begin,
        on_cell_executed=progress.end,
    )


def try_all(paths: list[Path], python: str, environment: str, kept: Path) -> list[dict]:
    """Run what has not run well yet, with a progress bar; return how each went.

    Args:
        paths: The notebooks.
        python: The Python to run them with.
        environment: Stands for everything that is installed beside it.
        kept: The folder of the results.
    """
    kept.mkdir(parents=True, exist_ok=True)
    results = []
    with tqdm(paths, unit="notebook") as bar:
        for path in bar:
            bar.set_postfix_str(path.stem)
            content = hashlib.sha256(path.read_bytes() + environment.encode() + LAST.encode())
            store = kept / f"{path.stem}.json"
            result = json.loads(store.read_text(encoding="utf8")) if store.is_file() else {}
            if result.get("key") != content.hexdigest() or result["failure"]:
                result = {"name": path.stem, **run_alone(path, python)}
                part = store.with_suffix(".part")
                part.write_text(json.dumps({**result, "key": content.hexdigest()}), "utf8")
                part.replace(store)
            results.append(result)
    return results


def main(argv: list[str] | None = None) -> int:
    """Run from the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("chapters", nargs="*", metavar="CHAPTER")
    parser.add_argument("--torch", default=TORCH, help="its version in the environment")
    parser.add_argument("--python", help="another environment's Python instead")
    args = parser.parse_args(argv)
    try:
        written = colab.write(ROOT, colab.OUT, args.chapters, address.current())
        if not args.python:
            project.add_colab(args.torch)
    except (BookError, address.AddressError, project.Stop, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    python = args.python or project.venv_program("python", project.colab_folder(args.torch))
    environment = python if args.python else Path(ROOT, project.COLAB).read_text("utf8")
    kept = ROOT / "_build" / "try-colab" / ("other" if args.python else f"torch-{args.torch}")
    paths = [colab.OUT / f"{name}.ipynb" for name in written]
    results = try_all(paths, python, environment, kept)
    print(f"  {'notebook':<26}{'seconds':>9}{'controls':>10}")
    for each in results:
        print(f"  {each['name']:<26}{each['seconds']:>9.1f}{each.get('controls', 'failed'):>10}")
    failures = [each["failure"] for each in results if each["failure"]]
    rule = "\n" + "=" * 80 + "\n"
    print(*(rule + failure for failure in failures), sep="")
    used = {f"torch {r['torch']}, numpy {r['numpy']}" for r in results if not r["failure"]}
    good = len(results) - len(failures)
    print(f"{good} of {len(results)} notebooks ran to their end ({'; '.join(sorted(used))})")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

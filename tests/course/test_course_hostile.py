"""Submissions that attack the grading: each gets a clear row, and none touches another's."""

import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile

import grade
import plain
import pytest
import views
import withheld
from course_examples import LIMITS, SOURCES, answers_only, submission, with_cell

NAME = "gradient-pieces"
TOTAL = {"q1": 4, "q2": 4, "q3": 3, "q4": 5, "q5": 4, "q6": 3, "q7": 4, "q8": 2}
NOTHING = dict.fromkeys(TOTAL, 0)


ELSEWHERE = os.path.join(tempfile.gettempdir(), "from-a-submission")
# Soon over for a loop, and long enough for answers that compute for milliseconds.
SHORT = {**LIMITS, "cell": 3.0, "call": 3.0}


@pytest.fixture
def judged(assignments, graders):
    """Grade a solution, or a stub, with one more cell; then check an honest one."""

    def judge(source, *, solved=True, limits=SHORT):
        notebook = answers_only(assignments[NAME], solved=solved)
        graders[NAME].limits = {**grade.LIMITS, **limits}
        row = graders[NAME].grade(submission(with_cell(notebook, source)))
        graders[NAME].limits = {**grade.LIMITS, **LIMITS}
        points = {name: float(row[name]) for name in TOTAL}
        return points, row["status"], row["message"]

    yield judge
    row = graders[NAME].grade(submission(answers_only(assignments[NAME])))
    assert {name: float(row[name]) for name in TOTAL} == TOTAL, row


def test_infinite_loop_costs_its_cell_only(judged):
    points, status, message = judged("while True:\n    pass")
    assert (points, status) == (TOTAL, "graded")
    assert re.fullmatch(r"cell \d+: stopped after 3 s", message)


def test_infinite_loop_in_a_function_costs_its_question(judged):
    points, status, message = judged("def residue(f, y, loss):\n    while True:\n        pass")
    assert points == {**TOTAL, "q1": 0}
    assert status == "graded"
    assert "q1: stopped after" in message


def test_loop_that_refuses_to_stop_meets_the_outer_limit(judged):
    source = "import time\nwhile True:\n    try:\n        time.sleep(9)\n    except:\n        pass"
    start = time.monotonic()
    points, status, message = judged(source, limits={**SHORT, "seconds": 6.0})
    assert (points, status) == (NOTHING, "stopped: too long")
    assert "limit on time" in message
    assert time.monotonic() - start < 20


def test_sys_exit_ends_its_cell_only(judged):
    points, status, message = judged("import sys\nsys.exit('bye')")
    assert (points, status) == (TOTAL, "graded")
    assert "SystemExit: bye" in message


@pytest.mark.parametrize(
    "source",
    ["import os\nos._exit(0)", "import ctypes\nctypes.string_at(0)", "import os\nos.abort()"],
    ids=["exit", "segfault", "abort"],
)
def test_end_of_python_is_told(judged, source):
    points, status, message = judged(source)
    assert (points, status) == (NOTHING, "ended early")
    assert "ended Python itself" in message


def test_forks_are_refused(judged):
    points, status, message = judged("import os\nwhile True:\n    os.fork()")
    assert (points, status) == (TOTAL, "graded")
    assert "PermissionError" in message


@pytest.mark.parametrize(
    "source",
    [
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.kill(os.getppid(), 9)",
        "import socket\nsocket.create_connection(('127.0.0.1', 80))",
        "import os\nos.execv('/bin/true', ['true'])",
        "open('/etc/passwd').read()",
        "import os\nos.listdir('/')",
        f"open({ELSEWHERE!r}, 'w')",
        "open(f'/proc/{__import__(\"os\").getppid()}/mem', 'rb')",
        "import resource\nresource.prlimit(1, resource.RLIMIT_CPU, (1, 1))",
        "import ctypes\nlibc = ctypes.CDLL(None)\nif libc.prctl(1, 0, 0, 0, 0):\n"
        "    raise PermissionError('it ends with its parent')",
    ],
    ids=[
        *("program", "kill", "network", "exec", "file", "folder", "write", "memory-of-another"),
        *("limits-of-another", "parent"),
    ],
)
def test_what_is_outside_is_closed(judged, source):
    points, status, message = judged(source)
    assert (points, status) == (TOTAL, "graded")
    assert "PermissionError" in message
    assert not os.path.exists(ELSEWHERE)


def test_what_notebooks_need_elsewhere_does_no_harm(judged):
    source = (
        "%matplotlib inline\n!pip install something\n"
        "from google.colab import drive\ndrive.mount('/content/drive')\n"
        "import otter\notter.Notebook(tests_dir='x').check('q1')\n"
        "if True:\n    %time x = 1"
    )
    assert judged(source) == (TOTAL, "graded", "")


def test_optimisers_of_torch_run(judged):
    # Making the first one takes seconds, and looks at the file of every module that is loaded.
    source = (
        "import torch\nw = torch.ones(2, requires_grad=True)\n"
        "optimiser = torch.optim.Adam([w], lr=0.1)\nw.sum().backward()\noptimiser.step()\n"
        "assert (w < 1).all()"
    )
    assert judged(source, limits=LIMITS) == (TOTAL, "graded", "")


def test_many_threads_are_stopped(judged):
    source = (
        "import threading, time\nthreading.stack_size(65536)\n"
        "for _ in range(500):\n    threading.Thread(target=time.sleep, args=(9,)).start()\n"
        "time.sleep(5)"
    )
    assert judged(source)[:2] == (NOTHING, "stopped: too many threads")


def test_memory_beyond_the_limit_is_refused(judged):
    points, status, message = judged("x = bytearray(1_000_000_000)")
    assert (points, status) == (TOTAL, "graded")
    assert "too much memory" in message


def test_shared_memory_beyond_the_limit_is_stopped(judged):
    source = (
        "import mmap, time\nm = mmap.mmap(-1, 1_000_000_000)\n"
        "for k in range(0, len(m), 4096):\n    m[k] = 1\ntime.sleep(1)"
    )
    assert judged(source)[:2] == (NOTHING, "stopped: too much memory")


@pytest.mark.parametrize(
    "source",
    [
        "while True:\n    print('x' * 1000)",
        "import sys\nwhile True:\n    sys.__stdout__.write('x' * 1000)",
        "import os\nwhile True:\n    os.write(1, b'x' * 100_000)",
        "with open('large', 'wb') as handle:\n    while True:\n        handle.write(b'x' * 10**6)",
    ],
    ids=["print", "stdout", "descriptor", "file"],
)
def test_huge_output_is_cut(judged, source):
    points, status, message = judged(source)
    assert status in ("graded", "stopped: too much output")
    assert "too" in message
    assert points == (TOTAL if status == "graded" else NOTHING)


def test_many_files_are_stopped(judged):
    source = "import time\nfor k in range(1000):\n    open(f'{k}', 'w').close()\ntime.sleep(3)"
    assert judged(source)[:2] == (NOTHING, "stopped: too much output")


def test_folders_without_end_are_stopped_and_removed(judged, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    source = (
        "import os, time\nfor k in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\n"
        "os.chmod('.', 0)\ntime.sleep(2)"
    )
    points, status, _ = judged(source)
    assert (points, status) == (NOTHING, "stopped: too much output")
    assert list(tmp_path.iterdir()) == []


def test_hidden_tests_cannot_be_found(judged, graders):
    assert "expected_alignment" in json.dumps(graders[NAME].archive)
    # Everything in Python's reach: objects, modules, and files below every folder it may list.
    source = (
        "import gc, os, sys\n"
        "dicts = [o for o in gc.get_objects() if isinstance(o, dict)]\n"
        "found = [o for o in dicts if 'expected_alignment' in o]\n"
        "found += [m for m in sys.modules if m in ('hidden', 'grade', 'views', 'sources')]\n"
        f"for top in ('.', '..', {str(views.ROOT)!r}, {str(views.ROOT / 'assignments')!r}, "
        f"{str(views.ROOT / '_build')!r}):\n"
        "    try:\n        found += [n for n in os.listdir(top) if 'gradient-pieces' in n]\n"
        "    except OSError:\n        pass\n"
        "try:\n"
        f"    found.append(open({str(views.ROOT / 'assignments' / (NAME + '.py'))!r}).read())\n"
        "except OSError:\n    pass\n"
        "assert not found, found"
    )
    assert judged(source) == (TOTAL, "graded", "")


def test_public_tests_are_not_trusted(judged):
    source = (
        "import os\nos.makedirs('tests', exist_ok=True)\n"
        "for k in range(1, 9):\n"
        "    open(f'tests/q{k}.py', 'w').write('OK_FORMAT = False')\n"
        "grader.check = lambda *a: 'passed'"
    )
    assert judged(source, solved=False)[0] == NOTHING


def test_patched_comparisons_change_nothing(judged):
    source = (
        "import builtins, json, sys\nimport numpy as np\nimport torch\n"
        "yes = lambda *a, **k: True\n"
        "np.allclose = np.array_equal = np.testing.assert_allclose = yes\n"
        "torch.allclose = torch.equal = torch.isclose = yes\n"
        "torch.Tensor.__eq__ = np.linalg.norm = yes\n"
        "builtins.isinstance = builtins.all = builtins.abs = yes\n"
    )
    assert judged(source, solved=False)[0] == NOTHING


def test_patched_runner_earns_nothing(judged):
    source = (
        "import sys, gc\n"
        "for module in list(sys.modules.values()):\n"
        "    for name in ('encode', 'decode', 'lines', '_answer', 'near', 'check', 'verdict'):\n"
        "        if hasattr(module, name) and 'json' not in module.__name__:\n"
        "            setattr(module, name, lambda *a, **k: {'shape': [], 'data': 'AAAAAAAA8D8='})\n"
        "for o in gc.get_objects():\n"
        "    if type(o).__name__ == '_Job':\n        o.calls = []\n"
    )
    assert judged(source, solved=False)[0] == NOTHING


def test_answers_that_equal_everything_earn_nothing(judged):
    source = (
        "class Yes(float):\n"
        "    def __eq__(self, other):\n        return True\n"
        "    def __ne__(self, other):\n        return False\n"
        "    def __sub__(self, other):\n        return 0.0\n"
        "    __rsub__ = __mul__ = __rmul__ = __sub__\n"
        "    def __lt__(self, other):\n        return True\n"
        "    __le__ = __gt__ = __ge__ = __lt__\n"
        "    def __array__(self, *args, **kwargs):\n        raise ValueError('no')\n"
        "    shape = (2,)\n"
        "for name in ('residue', 'layer_gradient', 'mean_slope', 'pieces', 'two_spikes',\n"
        "             'leading_alignment', 'best_mean', 'exponent'):\n"
        "    globals()[name] = lambda *args, **kwargs: Yes()\n"
    )
    assert judged(source)[0] == NOTHING


def test_own_result_files_count_nothing(judged):
    form = json.dumps(plain.encode(1.0))
    source = (
        "import json, os\n"
        f"lines = [{{'call': k, 'value': json.loads({form!r})}} for k in range(99)]\n"
        "text = chr(10).join(json.dumps(line) for line in [*lines, {'done': True}]) + chr(10)\n"
        "for name in ('answers.jsonl', 'results.json', 'grades.csv'):\n"
        "    open(name, 'w').write(text if name.endswith('l') else '{\"total\": 40}')\n"
        "os._exit(0)"
    )
    points, status, _ = judged(source)
    assert (points, status) == (NOTHING, "graded")


@pytest.mark.parametrize("kind", ["link", "pipe", "nonsense", "deep"])
def test_broken_result_files_are_survived(judged, kind):
    make = {
        "link": "os.symlink('/etc/passwd', name)",
        "pipe": "os.mkfifo(name)",
        "nonsense": "open(name, 'wb').write(bytes(range(256)) * 100)",
        "deep": "open(name, 'w').write('[' * 100_000 + chr(10) + '{\"call\": 0, \"value\": 3}')",
    }[kind]
    source = f"import os\nname = 'answers.jsonl'\n{make}\nos._exit(0)"
    assert judged(source)[:2] == (NOTHING, "ended early")


@pytest.mark.parametrize(
    "form",
    [
        3,
        [],
        {"shape": [10**12], "data": ""},
        {"shape": [-1], "data": "AA=="},
        {"shape": ["x"], "data": "AAAAAAAA8D8="},
        {"list": 3},
        {"dict": [1]},
        {"list": [{"list": [{"list": [{"list": [{"list": [{"list": []}]}]}]}]}]},
    ],
)
def test_forms_that_are_none_are_refused(form):
    with pytest.raises(plain.NotPlain):
        plain.decode(form)


def test_functions_of_the_package_are_switched_off(judged):
    source = (
        "import importlib\nimport lowgrad_utils as lg\n"
        "from lowgrad_utils.gradients import decompose\n"
        "def exponent(zetas, norms):\n    return lg.experiments.scenario(40, nu=0.25)\n"
        "def layer_gradient(X, W, a, gamma, r, activation):\n"
        "    network = lg.TwoLayerNetwork(lg.normalise_rows(W), a, activation)\n"
        "    return lg.closed_form_gradient(X, network, r)\n"
    )
    points, _, message = judged(source)
    assert points == {**TOTAL, "q2": 0, "q8": 0}
    assert "closed_form_gradient of lowgrad_utils is switched off" in message


# Ways to a module of the package that might be the whole one; each leaves its names in `space`.
WAYS_BACK = {
    "import": "import lowgrad_utils.networks\nspace = vars(lowgrad_utils.networks)",
    "reload": (
        "import importlib\nimport lowgrad_utils.networks\n"
        "space = vars(importlib.reload(lowgrad_utils.networks))"
    ),
    "import anew": (
        "import importlib, sys\n"
        "for name in [n for n in sys.modules if n.startswith('lowgrad_utils')]:\n"
        "    del sys.modules[name]\n"
        "space = vars(importlib.import_module('lowgrad_utils.networks'))"
    ),
    "import without finder": (
        "import importlib, sys\nimport lowgrad_utils.networks as kept\nspace = vars(kept)\n"
        "sys.meta_path[:] = [f for f in sys.meta_path if 'withheld' not in type(f).__module__]\n"
        "sys.path.insert(0, kept.__file__.rpartition('/lowgrad_utils/')[0])\n"
        "for name in [n for n in sys.modules if n.startswith('lowgrad_utils')]:\n"
        "    del sys.modules[name]\n"
        "importlib.invalidate_caches()\n"
        "space = vars(importlib.import_module('lowgrad_utils.networks'))"
    ),
    "getsource": (
        "import inspect\nimport lowgrad_utils.networks as kept\nspace = dict(vars(kept))\n"
        "exec(inspect.getsource(kept.gaussian_mean), space)\n"
        "kept.gaussian_mean = space['gaussian_mean']"
    ),
    "file": (
        "import lowgrad_utils.networks as kept\nspace = dict(vars(kept))\n"
        "exec(open(kept.__file__).read(), space)"
    ),
    "loader": (
        "import lowgrad_utils.networks as kept\nspace = dict(vars(kept))\n"
        "exec(kept.__loader__.get_source('lowgrad_utils.networks'), space)"
    ),
    "file loader": (
        "import importlib.util\nimport lowgrad_utils.networks as kept\nspace = dict(vars(kept))\n"
        "spec = importlib.util.spec_from_file_location('again', kept.__file__)\n"
        "module = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(module)\n"
        "space = vars(module)"
    ),
    "bytecode": (
        "import importlib.util, marshal\nimport lowgrad_utils.networks as kept\n"
        "space = dict(vars(kept))\n"
        "path = importlib.util.cache_from_source(kept.__file__)\n"
        "exec(marshal.loads(open(path, 'rb').read()[16:]), space)"
    ),
    "memory": (
        "import gc, types\nimport lowgrad_utils.networks as kept\nspace = dict(vars(kept))\n"
        "codes = [o for o in gc.get_objects() if isinstance(o, types.FunctionType)]\n"
        "for each in codes:\n"
        "    if each.__name__ == 'gaussian_mean' and 'raise' not in each.__code__.co_names:\n"
        "        if len(each.__code__.co_code) > 60:\n"
        "            space['gaussian_mean'] = kept.gaussian_mean = each"
    ),
}
# First, so that it stands also where the way itself ends with an error.
BY_IT = (
    "space = {}\n"
    "def mean_slope(s, activation):\n    return space['ACTIVATIONS'][activation].mu(s)\n"
)


@pytest.mark.parametrize("way", WAYS_BACK)
def test_withheld_functions_do_not_come_back(judged, way):
    points, _, message = judged(BY_IT + WAYS_BACK[way], limits=LIMITS)
    assert points == {**TOTAL, "q3": 0}, message
    assert "q3" in message


def test_what_is_withheld_would_be_a_right_answer(assignments):
    # So that the test before this one could fail.
    archive = {**views.autograder(assignments[NAME]), "withheld": []}
    with grade.Grader(archive, limits=LIMITS) as grader:
        for way in ("import", "reload", "import anew", "loader"):
            notebook = with_cell(answers_only(assignments[NAME]), BY_IT + WAYS_BACK[way])
            row = grader.grade(submission(notebook))
            assert row["q3"] == "3", (way, row["message"])


@pytest.mark.parametrize("name", [path.stem for path in SOURCES])
def test_everything_withheld_is_off_and_the_rest_is_there(name, assignments):
    names = assignments[name].settings["withheld"]
    folder = str(views.ROOT / "course")
    script = (
        "import importlib, pathlib, sys\n"
        f"sys.path.insert(0, {folder!r})\n"
        "import withheld\n"
        f"package, names = pathlib.Path({str(views.ROOT / 'lowgrad_utils')!r}), {names!r}\n"
        "withheld.install(package, names)\n"
        "for path in withheld.sources_without(package, ()):\n"
        "    importlib.import_module(withheld._module(package, pathlib.Path(path)))\n"
        "for name in names:\n"
        "    module, rest = name, []\n"
        "    while module not in sys.modules:\n"
        "        module, _, last = module.rpartition('.')\n"
        "        rest.insert(0, last)\n"
        "    found = sys.modules[module]\n"
        "    for each in rest[:-1]:\n"
        "        found = getattr(found, each)\n"
        "    found = vars(found)[rest[-1]]\n"
        "    found = getattr(found, 'fget', None) or getattr(found, 'func', found)\n"
        "    found = getattr(found, '__func__', found)\n"
        "    try:\n        found(*[None] * 0) if isinstance(found, type) else exec(found.__code__"
        ".replace(co_argcount=0, co_kwonlyargcount=0, co_posonlyargcount=0, co_flags=0))\n"
        "    except RuntimeError as error:\n        assert 'is switched off here' in str(error)\n"
        "    else:\n        raise SystemExit(f'{name} is there')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-1500:]


def test_unknown_name_is_not_withheld_in_silence():
    package = views.ROOT / "lowgrad_utils"
    for name in ("lowgrad_utils.networks.gaussian_man", "lowgrad_utils.nets.mu", "torch.nn.Linear"):
        with pytest.raises(LookupError, match="is no function or class"):
            withheld.sources_without(package, [name])


def _folder_of(tmp_path, assignments):
    folder = tmp_path / "handed in"
    folder.mkdir()
    good = answers_only(assignments[NAME])
    (folder / "a-good.ipynb").write_bytes(views.as_file(good))
    exits = with_cell(good, "import os\nos._exit(0)")
    (folder / "b-exits.ipynb").write_bytes(views.as_file(exits))
    (folder / "c-broken.ipynb").write_text("{'no': json")
    (folder / "d-empty").mkdir()
    (folder / "e-list.ipynb").write_text("[]")
    (folder / "f-link.ipynb").symlink_to(folder / "a-good.ipynb")
    os.mkfifo(folder / "g-pipe.ipynb")
    (folder / "h-notes.txt").write_text("I was ill.")
    (folder / "=cmd()").mkdir()
    with zipfile.ZipFile(folder / "i-zip.zip", "w") as archive:
        archive.writestr("work.ipynb", views.as_file(good))
    with zipfile.ZipFile(folder / "j-bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("work.ipynb", b" " * 30_000_000)
    return folder


def _rows(path):
    with path.open(newline="") as handle:
        return {row["submission"]: row for row in csv.DictReader(handle)}


def test_a_folder_with_everything_in_it(tmp_path, assignments):
    folder, out = _folder_of(tmp_path, assignments), tmp_path / "grades.csv"
    archive = views.autograder(assignments[NAME])
    grade.grade_folder(folder, out, archive, quiet=True, limits=LIMITS)
    rows = _rows(out)
    folders = {"'=cmd()/", "d-empty/"}
    assert set(rows) == folders | {path.name for path in folder.iterdir() if not path.is_dir()}
    full = str(sum(TOTAL.values()))
    good = {"a-good.ipynb", "i-zip.zip"}
    for name, row in rows.items():
        assert row["total"] == (full if name in good else "0"), row
        assert bool(row["message"]) == (name not in good), row
    assert rows["b-exits.ipynb"]["status"] == "ended early"
    for name in ("c-broken.ipynb", "d-empty/", "e-list.ipynb", "f-link.ipynb", "g-pipe.ipynb"):
        assert rows[name]["status"] == "no notebook"
    assert "larger than" in rows["j-bomb.zip"]["message"]
    assert "w1 (3 points)" in out.with_suffix(".written.md").read_text()

"""Notebooks that carry the package run anywhere, and the address is set and taken away whole."""

import base64
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import address
import build_book
import carrying
import colab
import nbformat
import pytest
import torch
import try_colab
import yaml
from book_sources import BookError, kernel_key, notebook_key, notebooks
from bs4 import BeautifulSoup
from execute import execution_report, result_path, run
from notebook_rules import notebook_problems
from small_books import REGISTRY, ROOT, SETTLE, notebook, write_book

CHAPTER = "chapters/gradient"
# Quick, with sliders, and it reads data.
WITH_DATA = "chapters/hessian-sweep"
HERE = address.Address("https://github.com/owner/name", "v1.0")
SETUP = carrying.SETUP_CELL.read_text(encoding="utf8")
SIZE_LIMIT = 25e6
# The grids' module itself reads these: one grid's cells follow from another's results.
ALWAYS = ["grids/hessian-training.csv", "grids/hessian-training.json"]
FIGURE_2 = ("grids/figure-2.csv", "grids/figure-2.json")
EMPTY = carrying.Carried("A", "", ())
ASSIGNMENT = '''# %% assignment
# title = "Small"
# minutes = {q1=120}

# %% [markdown]
# # Small
#
# **Question q1.** Read.

# %%
from lowgrad_utils import files, grids

# %% answer q1
def f(name):
    """The stored grid of a name."""
    # BEGIN SOLUTION
    return grids.stored(name)
    # END SOLUTION

# %% public q1
assert len(f("figure-2")), "it has rows"

# %% public q1
assert files.data_folder("mnist_subset.npz").read_bytes(), "it is there"

# %% hidden q1 2: rows
def calls(rng):
    return [call("f", name="figure-3")]

def check(calls, answers):
    assert len(answers[0])

# %% wrong q1 2: none
def f(name):
    return None

# %% wrong q1 2: the name
def f(name):
    return name

# %% wrong q1 2: another
def f(name):
    return grids.stored("figure-1")
'''


def _stored(document=CHAPTER):
    return json.loads((ROOT / f"{document}.ipynb").read_text(encoding="utf8"))


def _cells(content, *names):
    found = {cell.get("id"): carrying.source_of(cell) for cell in content["cells"]}
    return [found[name] for name in names]


def _archive(text):
    return zipfile.ZipFile(io.BytesIO(lzma.decompress(base64.b64decode(text))))


@pytest.fixture(scope="module")
def small():
    """A chapter that carries the package and two files, as a dictionary."""
    return colab.chapter(ROOT, CHAPTER, carrying.pack(FIGURE_2), None)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """The Python of an environment that has the book's packages but not lowgrad_utils."""
    return _environment_without_the_package(tmp_path_factory.mktemp("an environment"))


def _environment_without_the_package(folder):
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A plain path: what lies there is found, and what is only named there (the clone) is not.
    (packages / "book.pth").write_text(str(Path(torch.__file__).parent.parent) + "\n")
    return str(folder / "bin" / "python")


def _python(python, code, folder, **environment):
    """Run code in a folder; return its last line of output, or of its traceback."""
    kept = {k: v for k, v in os.environ.items() if k not in try_colab.DROPPED}
    # Through standard input: no command line is as long as a notebook that carries data.
    done = subprocess.run(
        [python, "-"],
        input=code,
        cwd=folder,
        capture_output=True,
        text=True,
        env=kept | environment,
    )
    return (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1]


# --- what is carried ----------------------------------------------------------------------------


def test_the_archive_holds_the_package_and_the_data_that_were_named(small):
    carried = _cells(small, "carried-1")[0]
    names = set(_archive("".join(re.findall(r'^    "(.*)"$', carried, re.MULTILINE))).namelist())
    sources = {p.relative_to(ROOT).as_posix() for p in ROOT.glob("lowgrad_utils/**/*.py")}
    data = {f"lowgrad_utils/data/grids/figure-2.{end}" for end in ("csv", "json")}
    papers = {"lowgrad_utils/LICENSE", "lowgrad_utils/data/README.md"}
    note = {"lowgrad_utils/data/CARRIED", "lowgrad_utils/claims.toml"}
    assert names == sources | data | papers | note


def test_packing_twice_gives_the_same_text():
    nothing = carrying.pack([])
    assert nothing == carrying.pack([])
    assert nothing.sha256 != carrying.pack(["grids/bridge.json"]).sha256


@pytest.mark.parametrize("name", ["no-such-file.npz", "../pyproject.toml", "grids"])
def test_what_is_no_shipped_file_is_refused(name):
    with pytest.raises(BookError, match="is no file in"):
        carrying.pack([name])


def test_a_notebook_that_installs_nothing_cannot_carry():
    with pytest.raises(BookError, match="setup_cell"):
        carrying.carry(notebook("# Title", "1 + 1"), EMPTY)


def test_the_stored_chapter_stays_as_it_is(small):
    before = _stored()
    carrying.carry(before, EMPTY)
    assert before == _stored()
    sources = [carrying.source_of(cell) for cell in small["cells"]]
    assert SETUP.strip() not in [source.strip() for source in sources]
    # Every other cell of code is the chapter's own.
    ours = [carrying.source_of(c) for c in _stored()["cells"] if c["cell_type"] == "code"][1:]
    theirs = [carrying.source_of(c) for c in small["cells"] if c["cell_type"] == "code"][2:]
    assert ours == theirs


def test_the_notebook_is_one_that_colab_opens(small):
    nbformat.validate(nbformat.from_dict(small))
    assert small["metadata"]["colab"]["name"] == "gradient.ipynb"
    assert small["metadata"]["colab"]["toc_visible"] is True
    assert "2 files" in _cells(small, "about")[0]
    for name in ("carried-1", "unpack"):
        (cell,) = [c for c in small["cells"] if c["id"] == name]
        assert cell["metadata"]["cellView"] == "form"
        assert cell["source"].startswith("# @title Setup")
    assert max(map(len, _cells(small, "carried-1")[0].splitlines())) < 5000


def test_text_of_the_chapters_keeps_the_rules_when_it_carries():
    for document in notebooks(ROOT):
        content = colab.chapter(ROOT, document, EMPTY, None)
        # The cells that carry are no cells of the book; the rules for text hold for all the rest.
        problems = [p for p in notebook_problems(content) if "code" not in p]
        assert problems == [], document


def test_links_lead_to_the_release_or_are_text():
    with_links = " ".join(carrying.source_of(c) for c in _stored("chapters/how-to-read")["cells"])
    assert "](setting.ipynb)" in with_links and "](../paper-1.md)" in with_links
    for document in notebooks(ROOT):
        text = "\n".join(
            carrying.source_of(c)
            for c in colab.chapter(ROOT, document, EMPTY, None)["cells"]
            if c["cell_type"] == "markdown"
        )
        assert not re.search(r"\]\([^)\s:]*\.(ipynb|md)\b", text), document
    alone = colab.chapter(ROOT, "chapters/how-to-read", EMPTY, None)
    assert "`setting.ipynb`" in _cells(alone, "named")[0]
    published = colab.chapter(ROOT, "chapters/how-to-read", EMPTY, HERE)
    text = " ".join(carrying.source_of(c) for c in published["cells"])
    start = "](https://colab.research.google.com/github/owner/name/blob/v1.0/chapters/"
    assert f"{start}setting.ipynb)" in text
    assert "](https://github.com/owner/name/blob/v1.0/paper-1.md)" in text
    assert "named" not in [cell.get("id") for cell in published["cells"]]


# --- what was read ------------------------------------------------------------------------------


def test_what_a_notebook_reads_is_noted(tmp_path):
    content = notebook(
        "# Title",
        "import numpy as np\nfrom lowgrad_utils import files\n"
        "np.load(files.data_folder('mnist_subset.npz')).files\n"
        "files.data_folder('grids', 'bridge.json').read_text()[:1]",
        "open('mine', 'w').close()\nsorted(name for name in dir() if 'record' in name)",
    )
    assert run(content, tmp_path) == ("grids/bridge.json", "mnist_subset.npz")
    # What notes it leaves no name behind.
    assert content.cells[2].outputs[0]["data"]["text/plain"] == "[]"


def test_an_assignment_reads_what_its_solution_and_public_tests_read(tmp_path):
    sys.path.append(str(ROOT / "course"))
    import reads
    import sources

    source = tmp_path / "small.py"
    source.write_text(ASSIGNMENT, encoding="utf8")
    wanted = [*FIGURE_2, *ALWAYS, "mnist_subset.npz"]
    assert reads.data_read(sources.read(source), tmp_path) == wanted
    source.write_text(ASSIGNMENT.replace("from lowgrad_utils import", "1 / 0  #", 1))
    with pytest.raises(sources.SourceError, match="ZeroDivisionError") as failure:
        reads.data_read(sources.read(source), tmp_path)
    assert "\n" not in str(failure.value)


def test_students_get_the_package_and_the_grader_skips_it(tmp_path):
    sys.path.append(str(ROOT / "course"))
    import make
    import runner

    source = ROOT / "assignments" / "gradient-pieces.py"
    student, solution, _ = make.make(source, tmp_path, data=["mnist_subset.npz"])
    content = json.loads(student.read_text(encoding="utf8"))
    assert "CARRIED" in _cells(content, "carried-1")[0]
    assert "CARRIED" not in solution.read_text(encoding="utf8")
    graded = [source for _, source in runner.enumerate_code(content)]
    assert graded and not any("CARRIED" in source for source in graded)


# --- unpacking ----------------------------------------------------------------------------------


def test_unpacking_in_an_empty_folder(small, elsewhere, tmp_path):
    code = "\n".join(
        [
            *_cells(small, "carried-1", "unpack"),
            "import sys, lowgrad_utils as lg",
            "from lowgrad_utils import files, grids",
            "first = lg.__file__",
            _cells(small, "unpack")[0],
            "rows = len(grids.stored('figure-2'))",
            "try:\n    lg.load('mnist')\nexcept FileNotFoundError as error:\n    said = str(error)",
            "print([first == lg.__file__, first, sys.path[-1], rows, said])",
        ]
    )
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    line = _python(elsewhere, code, tmp_path, TMPDIR=str(temporary))
    again, file, last, rows, said = eval(line)
    assert again and Path(file).parent.parent == Path(last)
    assert Path(last).parent == temporary
    assert rows == len((ROOT / "data/grids/figure-2.csv").read_text().splitlines()) - 1
    assert said.startswith("mnist_subset.npz is not here: this notebook carries only")
    # Python over, nothing is left.
    assert list(temporary.iterdir()) == []


def test_much_data_lie_in_several_cells_that_may_run_twice(elsewhere, tmp_path, monkeypatch):
    monkeypatch.setattr(carrying, "PART", 50 * carrying.LINE)
    content = colab.chapter(ROOT, CHAPTER, carrying.pack(["grids/figure-2.csv"]), None)
    names = [c["id"] for c in content["cells"] if c["id"].startswith("carried-")]
    assert names == ["carried-1", "carried-2", "carried-3"][: len(names)] and len(names) > 1
    parts = _cells(content, *names)
    assert max(map(len, parts)) < 51 * (carrying.LINE + 10)
    said = _python(elsewhere, "\n".join([*parts[1:], *_cells(content, "unpack")]), tmp_path)
    assert said == "RuntimeError: Run the cells above first: they hold the package."
    twice = [parts[1], *parts, *parts, *_cells(content, "unpack", "unpack")]
    assert "is here already" in _python(elsewhere, "\n".join(twice), tmp_path)


def test_an_installed_package_is_not_hidden(small, tmp_path):
    code = "\n".join([*_cells(small, "carried-1", "unpack"), "import lowgrad_utils as lg"])
    # This interpreter has the clone's.
    line = _python(sys.executable, f"{code}\nprint(lg.__file__)", tmp_path)
    assert Path(line) == ROOT / "lowgrad_utils" / "__init__.py"
    # So has a folder that holds a package of that name.
    (tmp_path / "lowgrad_utils").mkdir()
    (tmp_path / "lowgrad_utils" / "__init__.py").write_text("mine = 1\n")
    assert _python(sys.executable, f"{code}\nprint(lg.mine)", tmp_path) == "1"


def test_an_empty_folder_of_that_name_hides_nothing(small, elsewhere, tmp_path):
    (tmp_path / "lowgrad_utils").mkdir()
    code = "\n".join([*_cells(small, "carried-1", "unpack"), "import lowgrad_utils as lg"])
    assert _python(elsewhere, f"{code}\nprint(lg.LossCurvature.__name__)", tmp_path) == (
        "LossCurvature"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a, b: (a.replace('"/Td6', '"/Td7', 1), b), "does not have the SHA-256 noted here"),
        (lambda a, b: (a[:5000] + a[5001:], b), "does not have the SHA-256 noted here"),
        (lambda a, b: (a, b.replace('SHA256 = "', 'SHA256 = "0')), "does not have the SHA-256"),
        (lambda a, b: ("", b), "Run the cells above first"),
    ],
    ids=["changed", "shortened", "another hash", "not run"],
)
def test_damage_is_told_in_one_line_and_nothing_is_unpacked(
    small, elsewhere, tmp_path, change, said
):
    code = "\n".join(change(*_cells(small, "carried-1", "unpack")))
    line = _python(elsewhere, code, tmp_path, TMPDIR=str(tmp_path))
    assert line.startswith("RuntimeError: ") and said in line
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_named_with_what_to_do(small, tmp_path):
    bare = tmp_path / "bare"
    venv.create(bare, with_pip=False)
    code = "\n".join(_cells(small, "carried-1", "unpack"))
    line = _python(str(bare / "bin" / "python"), code, tmp_path)
    assert re.fullmatch(
        r"ImportError: No module named '\w+': run %pip install numpy .*torch.* and repeat\.", line
    )


# --- running ------------------------------------------------------------------------------------


def test_a_chapter_runs_alone_with_its_sliders(html, elsewhere, tmp_path):
    key = notebook_key(ROOT, WITH_DATA, kernel_key(ROOT))
    data = execution_report(result_path(ROOT, WITH_DATA, key)).data
    assert data
    path = tmp_path / "chapter.ipynb"
    content = colab.chapter(ROOT, WITH_DATA, carrying.pack(data), None)
    path.write_text(json.dumps(content), encoding="utf8")
    assert path.stat().st_size < SIZE_LIMIT
    went = try_colab.run_alone(path, elsewhere)
    assert went["failure"] == ""
    assert went["controls"] > 0
    assert not Path(went["package"]).is_relative_to(ROOT)


def test_a_chapter_without_its_data_stops_and_is_reported(elsewhere, tmp_path):
    path = tmp_path / "chapter.ipynb"
    content = colab.chapter(ROOT, CHAPTER, carrying.pack([]), None)
    text = "from lowgrad_utils import load\nload('mnist')"
    # Before the chapter's own cells, so that nobody waits for them.
    place = [cell.get("id") for cell in content["cells"]].index("unpack") + 1
    content["cells"] = [*content["cells"][:place], nbformat.v4.new_code_cell(text)]
    path.write_text(json.dumps(content), encoding="utf8")
    results = try_colab.try_all([path], elsewhere, "here", tmp_path / "kept")
    assert "mnist_subset.npz is not here" in results[0]["failure"]
    assert "cell 5 of" in results[0]["failure"]


def test_what_ran_well_is_not_run_again(tmp_path, monkeypatch):
    path, kept, ran = tmp_path / "a.ipynb", tmp_path / "kept", []
    path.write_text("{}")
    outcomes = iter(["it failed", "", "", ""])

    def run_alone(path, python):
        ran.append(path.stem)
        return {"seconds": 0.0, "failure": next(outcomes)}

    monkeypatch.setattr(try_colab, "run_alone", run_alone)
    for environment in ("one", "one", "one", "other"):
        try_colab.try_all([path], "python", environment, kept)
    # Failed, then well, then kept, then in another environment.
    assert len(ran) == 3
    path.write_text("{} ")
    try_colab.try_all([path], "python", "other", kept)
    assert len(ran) == 4


# --- the address --------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path):
    """A copy of all files that have the address."""
    for name in ("README.md", "CITATION.cff", "_config.yml", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    for folder in ("tools", "chapters"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    # The tests hold whether the book is published or not.
    address.set_everywhere(None, tmp_path)
    return tmp_path


def _content(root):
    return {p.relative_to(root): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_address_is_set_changed_and_taken_away(project):
    before = _content(project)
    assert address.current(project) is None
    changed = address.set_everywhere(HERE, project)
    assert len(changed) == len(list((project / "chapters").glob("*.ipynb"))) + 4
    assert address.current(project) == HERE
    assert address.set_everywhere(HERE, project) == []
    other = address.Address("https://github.com/someone/other.name", "v2.0.1", "develop")
    address.set_everywhere(other, project)
    assert address.current(project) == other
    # A link of the text to itself apart, nothing is left of the first one.
    assert [path for path in changed if b"owner/name@" in path.read_bytes()] == []
    assert b"owner/name" not in (project / "_config.yml").read_bytes()
    address.set_everywhere(None, project)
    assert _content(project) == before


def test_with_an_address_everything_agrees(project):
    address.set_everywhere(HERE, project)
    setup = (project / "tools" / "setup_cell.py").read_text(encoding="utf8")
    assert 'ADDRESS = "git+https://github.com/owner/name@v1.0"' in setup
    for path in (project / "chapters").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf8"))["cells"]
        assert setup.strip() in [carrying.source_of(cell).strip() for cell in cells], path
    citation = yaml.safe_load((project / "CITATION.cff").read_text(encoding="utf8"))
    assert citation["repository-code"] == HERE.repository
    readme = (project / "README.md").read_text(encoding="utf8")
    assert f"({HERE.colab('chapters/how-to-read.ipynb')})" in readme.splitlines()[2]


@pytest.mark.parametrize(
    ("repository", "tag", "said"),
    [
        ("http://github.com/owner/name", "v1.0", "is no repository that Colab opens"),
        ("https://gitlab.com/owner/name", "v1.0", "is no repository that Colab opens"),
        ("https://github.com/owner", "v1.0", "is no repository that Colab opens"),
        ("https://github.com/owner/na me", "v1.0", "is no repository that Colab opens"),
        ('https://github.com/owner/name"', "v1.0", "is no repository that Colab opens"),
        ("https://github.com/owner/..", "v1.0", "is no repository that Colab opens"),
        ("owner/name", "v1.0", "is no repository that Colab opens"),
        ("https://github.com/owner/name", "", "TAG '' is no name of git's"),
        ("https://github.com/owner/name", "v1 0", "is no name of git's"),
        ("https://github.com/owner/name", "v1..0", "is no name of git's"),
        ("https://github.com/owner/name", '1"; import os', "is no name of git's"),
    ],
)
def test_bad_address_is_one_line(repository, tag, said):
    with pytest.raises(address.AddressError) as failure:
        address.checked(repository, tag)
    assert said in str(failure.value) and "\n" not in str(failure.value)


@pytest.mark.parametrize("end", ["", "/", ".git"])
def test_forms_of_an_address(end):
    assert address.checked(f" https://github.com/owner/name{end}", "v1.0") == HERE
    assert address.checked("", "v1.0") is None


@pytest.mark.parametrize("name", ["README.md", "_config.yml", "chapters/gradient.ipynb"])
def test_nothing_is_written_when_a_file_has_no_place_for_it(project, name):
    (project / name).write_text("Nothing here\n")
    before = _content(project)
    with pytest.raises(address.AddressError):
        address.set_everywhere(HERE, project)
    assert _content(project) == before


def test_make_says_how_to_name_an_address():
    done = subprocess.run(["make", "address"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode and done.stderr.startswith("Name it, as in 'make address REPOSITORY=")
    wrong = [sys.executable, "tools/address.py", "nowhere"]
    done = subprocess.run(wrong, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1


def _buttons(page):
    soup = BeautifulSoup(page.read_text(encoding="utf8"), "html.parser")
    return {link["href"] for link in soup.select("a[href^=http]")}


def test_the_built_book_has_buttons_only_with_an_address(tmp_path):
    root = write_book(tmp_path / "book", REGISTRY, first=notebook("# First", SETTLE))
    text = (ROOT / "_config.yml").read_text(encoding="utf8")
    for where in (None, HERE):
        config = yaml.safe_load(address.configured(text, where))
        config["sphinx"]["config"]["companion_registry"] = "registry.toml"
        (root / "_config.yml").write_text(yaml.safe_dump(config), encoding="utf8")
        html = build_book.build(root)
        links = _buttons(html / "chapters" / "first.html")
        ours = {link for link in links if "github.com/" in link or "colab" in link}
        if where is None:
            assert ours == set()
            continue
        assert HERE.colab("chapters/first.ipynb") in ours
        assert HERE.repository in ours
        assert f"{HERE.repository}/edit/main/chapters/first.ipynb" in ours
        assert any(link.startswith(f"{HERE.repository}/issues/new") for link in ours)
        assert all("owner/name" in link for link in ours)


def test_a_chapter_installs_the_release_and_replaces_nothing(tmp_path, project):
    address.set_everywhere(HERE, project)
    # One file of the data is enough to see that data travel along.
    left_out = shutil.ignore_patterns("__pycache__", "cifar*", "fashion*", "*.csv", "*.pt")
    for name in ("lowgrad_utils", "data"):
        shutil.copytree(ROOT / name, project / name, ignore=left_out)
    shutil.copy(ROOT / "LICENSE", project / "LICENSE")
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "release"], ["tag", "v1.0"]):
        subprocess.run([*git, *words], cwd=project, check=True)
    # What comes after the release must not be what is installed.
    (project / "lowgrad_utils" / "__init__.py").write_text("raise ImportError('not released')\n")
    subprocess.run([*git, "commit", "-qam", "later"], cwd=project, check=True)
    folder = tmp_path / "reader"
    python = _environment_without_the_package(folder)
    setup = (project / "tools" / "setup_cell.py").read_text(encoding="utf8")
    code = (
        f"import torch, numpy\nbefore = (torch.__file__, numpy.__file__)\n{setup}\n"
        "import lowgrad_utils as lg\nfrom importlib.metadata import version\n"
        "lg.load('mnist')\n"
        "print([lg.__file__, before == (torch.__file__, numpy.__file__), version('lowgrad-utils')])"
    )
    # Not beside the copy, which would be found there.
    work = tmp_path / "somewhere" / "empty"
    work.mkdir(parents=True)
    said = _python(
        python,
        code,
        work,
        # The repository's address leads to the copy, as it would lead to the published one.
        GIT_CONFIG_COUNT="1",
        GIT_CONFIG_KEY_0=f"url.file://{project}/.git.insteadOf",
        GIT_CONFIG_VALUE_0=HERE.repository,
        # With the build tool that is there: this test asks nobody for packages.
        PIP_NO_BUILD_ISOLATION="0",
        PIP_NO_INDEX="1",
    )
    file, kept, found = eval(said)
    assert f'version = "{found}"' in (project / "pyproject.toml").read_text()
    assert Path(file).is_relative_to(folder) and kept
    # Beside the package itself nothing was installed.
    added = {path.name.split("-")[0] for path in Path(file).parents[1].iterdir()}
    assert added == {"lowgrad_utils", "book.pth"}

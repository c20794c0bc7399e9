"""What is said to those who carry the project on is true of its files."""

import re
import tomllib

import pytest
import torch
import yaml
from small_books import ROOT

PAGES = ("README.md", "CONTRIBUTING.md", "RELEASING.md", "CHANGELOG.md")
# Paths in code: a folder, then names; what a reader is to fill in is in capitals.
PATH = re.compile(r"(?<![\w/.~-])((?:\.?[a-z_]+/)+[\w.-]+\.(?:py|toml|txt|md|yml|ipynb))")
NOT_YET = {"chapters/batch-norm.ipynb", "assignments/NAME.py"}


@pytest.fixture(scope="module")
def version():
    """The version that the package has."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_citation_is_of_this_version(version):
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == version


def test_the_changelog_goes_up_to_this_version(version):
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert len(headings) == 1 or headings[1].startswith(f"{version} ")


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page):
    text = (ROOT / page).read_text()
    links = [link.partition("#")[0] for link in re.findall(r"\]\((?!\w+:)([^)]+)\)", text)]
    named = {*PATH.findall(text), *links} - NOT_YET
    built = {path for path in named if path.startswith(("_build/", ".venv/"))}
    assert [path for path in sorted(named - built) if not (ROOT / path).exists()] == []


def test_the_readmes_python_runs(capsys):
    """In one session, from top to bottom, with a classifier as the text asks for."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    loader = [(torch.randn(40, 8), torch.arange(40) % 3)]
    blocks = re.findall(r"^```python\n(.+?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    session = {"model": model.eval(), "loader": loader}
    for block in blocks:
        exec(block, session)
        assert capsys.readouterr().out, f"This block prints nothing:\n{block}"
    # What it printed, against the whole matrix: logits' Jacobian and second derivative of the loss.
    weights, x = dict(model.named_parameters()), loader[0][0]
    blocks = torch.func.jacrev(lambda w: torch.func.functional_call(model, w, (x,)))(weights)
    jacobian = torch.cat([block.detach().flatten(2) for block in blocks.values()], dim=2)
    p = torch.softmax(model(x), dim=1).detach()
    curvature = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    gauss_newton = torch.einsum("icp,icd,idq->pq", jacobian, curvature, jacobian) / len(x)
    expected = torch.linalg.eigvalsh(gauss_newton).flip(0)[:10]
    assert torch.allclose(session["top"].values, expected, atol=1e-5)


def test_make_knows_every_command_that_is_named():
    targets = set(re.findall(r"^([a-z-]+(?: [a-z-]+)*):", (ROOT / "Makefile").read_text(), re.M))
    known = {word for line in targets for word in line.split()}
    for page in PAGES:
        named = set(re.findall(r"`make ([a-z-]+)", (ROOT / page).read_text()))
        assert named <= known, page


def test_the_workflow_runs_what_anybody_runs():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "book.yml").read_text())
    test, publish = workflow["jobs"]["test"], workflow["jobs"]["publish"]
    assert {"run": ".ci/run"} in test["steps"]
    assert publish["needs"] == "test"
    # Only a tag publishes, and only that job may write.
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert workflow["permissions"] == {"contents": "read"}
    uploads = [s for s in test["steps"] if "upload-pages-artifact" in s.get("uses", "")]
    assert [(step["if"], step["with"]["path"]) for step in uploads] == [
        (publish["if"], "_build/html")
    ]

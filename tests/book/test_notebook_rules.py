"""The notebooks keep to what every reader renders, and the rules notice when one does not."""

import json

import pytest
from book_sources import notebooks, page_source, toc_documents
from notebook_rules import (
    SETUP_CELL,
    anchors_of,
    code_problems,
    link_problems,
    main,
    markdown_problems,
    notebook_problems,
)
from small_books import ROOT, notebook

DOCUMENTS = toc_documents(ROOT)
NOTEBOOKS = notebooks(ROOT)


@pytest.mark.parametrize("document", NOTEBOOKS)
def test_notebook_keeps_the_rules(document):
    content = json.loads(page_source(ROOT, document).read_text(encoding="utf8"))
    assert notebook_problems(content) == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_work_in_the_files_themselves(document):
    assert link_problems(page_source(ROOT, document)) == []


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("```{note}\nText\n```", "directive"),
        (":::{note}\nText\n:::", "directive"),
        ("> ```{note}\n> Text\n> ```", "directive"),
        ("See {ref}`here`.", "role"),
        ("(my-label)=\n## Title", "label"),
        ("The value is {{ value }}.", "substitution"),
        ("\\begin{align}a&=b\\end{align}", "environment"),
        ("About TODO minutes.", "TODO"),
        ("![](picture.png)", "image"),
        ('<img src="picture.png">', "image"),
        ("Text $$x = 1$$ and on.", "alone"),
        ("Text\n$$x = 1$$\n\nText", "empty line around"),
        ("$$\nx = 1\n$$\nText", "empty line around"),
        ("$$\nx\n\n= 1\n$$", "empty line inside"),
        ("$$\nx = 1", "partner"),
        ("> $$\n> x = 1\n> $$", "one line"),
        ("<details><summary>The value of $x$</summary>\n\nText\n</details>", "summary"),
        ("<details><summary>Solution</summary>\nText\n</details>", "summary"),
        ("<details><summary>Solution</summary>Text\n</details>", "summary"),
        ('> <a id="x"></a>**Look here.** Text', "no statement"),
        ("> **Theorem 3.1 (Name).** Text", "anchor"),
        ('> <a id="Theorem_3"></a>**Theorem 3.1 (Name).** Text', "a-z"),
        ('> <a id="theorem-3-1"></a>**Theorem 3.1 (Name)** Text', "full stop"),
    ],
)
def test_bad_markdown_is_noticed(source, word):
    problems = markdown_problems(source)
    assert len(problems) == 1, problems
    assert word in problems[0]


@pytest.mark.parametrize(
    "source",
    [
        "Text with $x_{{1}}$, `{ref}` in code and $\\mathbf{{x}}$.",
        "Text\n\n$$\nx = 1 \\tag{5}\n$$\n\nText",
        '> <a id="theorem-3-1"></a>**Theorem 3.1 (Name).** Let\n>\n> $$x = 1 \\tag{5}$$\n>\n> so.',
        "> **Exercise 2 (Name).** Do\n\n<details><summary>Solution</summary>\n\n$x$\n\n</details>",
        "$$\\begin{aligned}a&=b\\end{aligned}$$",
        "![A picture](picture.png)",
        "Fill every `TODO`.",
        "```python\nx = {1: 2}\n```",
        "> Somebody said so.",
    ],
)
def test_good_markdown_passes(source):
    assert markdown_problems(source) == []


def test_length_of_code():
    assert code_problems("x = 1\n\n" * 12) == []
    assert "13 lines" in code_problems("x = 1\n" * 13)[0]


def _complete_notebook(*cells):
    content = notebook("# Title", SETUP_CELL.read_text(encoding="utf8"), *cells)
    content.cells[1].metadata["tags"] = ["remove-cell"]
    return content


def test_complete_notebook_passes():
    assert notebook_problems(_complete_notebook("1 + 1")) == []


@pytest.mark.parametrize(
    "change", ["output", "count", "tag", "setup", "title", "titles", "anchors"]
)
def test_bad_notebook_is_noticed(change):
    content = _complete_notebook("1 + 1")
    if change == "output":
        content.cells[2].outputs = [{"output_type": "stream", "name": "stdout", "text": "2"}]
    elif change == "count":
        content.cells[2].execution_count = 1
    elif change == "tag":
        content.cells[1].metadata["tags"] = []
    elif change == "setup":
        content.cells[1].source += "\nimport this"
    elif change == "title":
        content.cells[0].source = "No title"
    elif change == "titles":
        content.cells[0].source += "\n\n# Another"
    elif change == "anchors":
        quote = '> <a id="lemma-1"></a>**Lemma 1.** Text'
        content.cells[0].source += f"\n\n{quote}\n\n{quote}"
    assert len(notebook_problems(content)) == 1


SLIDER = "axis = 1\ndef draw(a):\n    return help(a)\ndef help(a):\n    return axis\n"


@pytest.mark.parametrize(
    ("later", "name"),
    [
        ("axis = 2", "axis"),
        ("for axis in range(2):\n    pass", "axis"),
        ("def help(a):\n    return a", "help"),
    ],
)
def test_a_slider_keeps_its_names(later, name):
    problems = notebook_problems(_complete_notebook(SLIDER, "figures.slider(draw, a=[1])", later))
    assert len(problems) == 1 and f"'{name}'" in problems[0]


@pytest.mark.parametrize(
    "later", ["def draw(a):\n    axis = 2", "[axis for axis in range(2)]", "print(axis)"]
)
def test_a_sliders_function_may_be_replaced(later):
    cells = (SLIDER, "figures.slider(draw, a=[1])", later)
    assert notebook_problems(_complete_notebook(*cells)) == []


@pytest.mark.parametrize(
    ("text", "said"), [(None, "No such file"), ("{", "no notebook"), ("[]", "no notebook")]
)
def test_a_file_that_is_no_notebook_is_told_and_kept(tmp_path, capsys, text, said):
    path, good = tmp_path / "draft.ipynb", tmp_path / "good.ipynb"
    good.write_text(json.dumps(_complete_notebook("1 + 1") | {"metadata": {"widgets": 1}}))
    before = good.read_text()
    if text is not None:
        path.write_text(text)
    assert main(["--clear", str(good), str(path)]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{path}: ") and said in line
    assert good.read_text() == before


def test_links_are_followed(tmp_path):
    (tmp_path / "other.md").write_text('# Where it breaks\n\n<a id="lemma-1"></a>\n')
    page = tmp_path / "page.md"
    good = "[a](other.md) [b](other.md#Where-it-breaks) [c](other.md#lemma-1) [d](#Mine) [e](x:y)"
    page.write_text(f"# Mine\n\n{good}\n")
    assert link_problems(page) == []
    page.write_text("[a](missing.md) [b](other.md#where-it-breaks) [c](#Mine)")
    assert len(link_problems(page)) == 3


def test_anchors_of_claims(tmp_path):
    path = tmp_path / "page.ipynb"
    path.write_text(json.dumps(notebook("# A *b* `c`", 'claims.settle("lrg.x", error=1)')))
    assert anchors_of(path) == {"A-b-c", "claim-lrg.x"}

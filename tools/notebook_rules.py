"""The rules that let one notebook read well in the book, in Jupyter, on GitHub and in Colab.

    python tools/notebook_rules.py [--clear] [NOTEBOOK ...]

Each check returns its problems as lines; no line means that the notebook keeps the rules.
``--clear`` first takes out what running a notebook left in it.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from book_sources import notebooks, page_source

ROOT = Path(__file__).resolve().parent.parent
SETUP_CELL = Path(__file__).with_name("setup_cell.py")
CODE_LINES = 12
MATH = re.compile(r"\$\$.*?\$\$|\$(?!\s)[^$\n]+?\$", re.DOTALL)
CODE = re.compile(r"^(```|~~~).*?^\1\s*$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
MYST = {
    "directive": re.compile(r"^\s*(?:>\s*)*(?:```+|~~~+|:::+)\s*\{", re.MULTILINE),
    # Never behind a backtick: that brace is the inside of code.
    "role": re.compile(r"(?<![`\w])\{[\w:.+-]+\}`[^`\n]+`"),
    "label": re.compile(r"^\s*(?:>\s*)*\([^()\n]+\)=\s*$", re.MULTILINE),
    "substitution": re.compile(r"\{\{[^{}\n]*\}\}"),
}
SUMMARY = re.compile(r"<summary>(.*?)</summary>([^\n]*)(\n[^\n]*)?", re.DOTALL)
IMAGE_WITHOUT_ALT = re.compile(r"!\[\s*\]\(|<img(?![^>]*\balt=\"[^\"]+\")[^>]*>")
TODO = re.compile(r"\bTODO\b")
BARE_ENVIRONMENT = re.compile(r"\\begin\{")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
OPENING = re.compile(r"^> *(?:<a id=\"(?P<anchor>[^\"]*)\"></a>)? *\*\*(?P<name>.+?)\*\*")
ANCHOR = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")
ANCHOR_FORM = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
HEADING = re.compile(r"^#{1,6} +(.+?) *#* *$", re.MULTILINE)
SETTLED = re.compile(r"settle\(\s*[\"']([\w.-]+)[\"']")


def _statement_name() -> re.Pattern:
    # The one definition of what a statement is called lives where statements are made.
    sys.path.insert(0, str(ROOT / "_ext"))
    from companion.statements import NAME

    return NAME


STATEMENT_NAME = _statement_name()


def source_of(cell: dict[str, Any]) -> str:
    """Return a cell's text, which files store as a string or as a list of lines."""
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def notebook_problems(notebook: dict[str, Any]) -> list[str]:
    """Return everything in one notebook that some reader would see badly.

    Args:
        notebook: The notebook as nested dictionaries.
    """
    found = [*_whole(notebook), *slider_problems(notebook)]
    for number, cell in enumerate(notebook["cells"], 1):
        rules = markdown_problems if cell["cell_type"] == "markdown" else code_problems
        found += [f"cell {number}: {problem}" for problem in rules(source_of(cell))]
        if cell.get("outputs") or cell.get("execution_count"):
            found.append(f"cell {number}: stored output; clear it before saving")
    return found


def _whole(notebook: dict[str, Any]) -> Iterator[str]:
    text = [source_of(c) for c in notebook["cells"] if c["cell_type"] == "markdown"]
    titles = [line for cell in text for line in cell.splitlines() if line.startswith("# ")]
    if not text or not text[0].startswith("# ") or len(titles) != 1:
        yield "the first Markdown cell must open with '# ' and the only title"
    anchors = [a for cell in text for a in ANCHOR.findall(cell)]
    for anchor in {a for a in anchors if anchors.count(a) > 1}:
        yield f"the anchor '{anchor}' stands here twice"
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    if not code or source_of(code[0]).strip() != SETUP_CELL.read_text(encoding="utf8").strip():
        yield "the first code cell must be the text of tools/setup_cell.py"
    elif "remove-cell" not in code[0]["metadata"].get("tags", []):
        yield "the first code cell must carry the tag 'remove-cell'"


def slider_problems(notebook: dict[str, Any]) -> Iterator[str]:
    """Yield names by which a slider draws and which a later cell uses for something else.

    While the book is built all frames are drawn at once; in a live kernel the reader moves the
    slider after the last cell has run.

    Args:
        notebook: The notebook as nested dictionaries.
    """
    code = [source_of(c) for c in notebook["cells"] if c["cell_type"] == "code"]
    trees = [ast.parse(source) for source in code]
    functions: dict[str, set[str]] = {}
    for number, tree in enumerate(trees):
        made = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        functions |= {name: _names(node, ast.Load) for name, node in made.items()}
        later = set().union(*map(_made_at_top, trees[number + 1 :]))
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("slider"):
                # The function itself was handed over; what it calls is looked up when it runs.
                used = _reached(_names(call.args[0], ast.Load), functions)
                for name in sorted((used - _names(call.args[0], ast.Load)) & later):
                    yield f"a slider draws with '{name}', which a later cell uses anew: rename one"


def _names(node: ast.AST, context: type) -> set[str]:
    inside = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    found = {n.id for n in inside if isinstance(n.ctx, context)}
    if context is ast.Store or not isinstance(node, ast.FunctionDef):
        return found
    arguments = {a.arg for a in ast.walk(node.args) if isinstance(a, ast.arg)}
    return found - arguments - _names(node, ast.Store)


def _made_at_top(tree: ast.AST) -> set[str]:
    """Return the names that a cell gives to something, not those inside its functions."""
    found = set()
    inner = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef):
            found.add(child.name)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            found.add(child.id)
        elif not isinstance(child, inner):
            found |= _made_at_top(child)
    return found


def _reached(names: set[str], functions: dict[str, set[str]]) -> set[str]:
    """Return the names, and those that functions of these names use, and so on."""
    found: set[str] = set()
    while names - found:
        found, names = found | names, set().union(*(functions.get(n, set()) for n in names))
    return found


def code_problems(source: str) -> list[str]:
    """Return what is wrong with a code cell: only its length can be, `ruff` sees the rest."""
    lines = [line for line in source.splitlines() if line.strip()]
    if len(lines) > CODE_LINES:
        return [f"{len(lines)} lines of code, more than {CODE_LINES}: move logic to lowgrad_utils"]
    return []


def markdown_problems(source: str) -> list[str]:
    """Return what some reader would see badly in a Markdown cell.

    Example:
        >>> markdown_problems("See {ref}`here`.")
        ['MyST role, which only the book reads']
    """
    without_math = MATH.sub("", source)
    # Fences stay for the directives; inline code would otherwise look like a role.
    prose = CODE.sub("", without_math)
    found = [
        f"MyST {name}, which only the book reads"
        for name, pattern in MYST.items()
        if pattern.search(prose if name == "substitution" else without_math)
    ]
    if BARE_ENVIRONMENT.search(prose):
        found.append("a LaTeX environment outside $$, which GitHub does not typeset")
    if TODO.search(prose):
        found.append("a TODO that is not filled")
    if IMAGE_WITHOUT_ALT.search(prose):
        found.append("an image without alternative text")
    found += [*_display_problems(source), *_summary_problems(source), *_quotes(source)]
    return list(dict.fromkeys(found))


def _display_problems(source: str) -> Iterator[str]:
    """Check that display formulas stand alone, and on one line where they are quoted."""
    lines = CODE.sub("", source).splitlines()
    bare = [re.sub(r"^[>\s]+", "", line).rstrip() for line in lines]
    inside = False
    for number, (line, text) in enumerate(zip(lines, bare, strict=True)):
        if "$$" not in text:
            if inside and not text:
                yield "an empty line inside $$, which ends the formula for some readers"
            continue
        whole = text.count("$$") == 2 and text.startswith("$$") and text.endswith("$$")
        if not (whole or text == "$$"):
            yield f"display formula not alone on its line: {line.strip()[:60]}"
            continue
        if text == "$$" and line.lstrip().startswith(">"):
            yield "a quoted display formula must stand on one line, $$ included"
            continue
        before, after = number > 0 and bare[number - 1], bare[number + 1 : number + 2]
        opens, closes = whole or not inside, whole or inside
        if (opens and before) or (closes and any(after)):
            yield f"display formula without an empty line around it: {line.strip()[:60]}"
        inside = not whole and not inside
    if inside:
        yield "a $$ without its partner"


def _summary_problems(source: str) -> Iterator[str]:
    for inside, rest, after in SUMMARY.findall(source):
        if "$" in inside:
            yield "a formula in <summary>, which stays raw for some readers"
        if rest.strip() not in ("", "</details>") or after.strip():
            yield "no empty line after <summary>, so what follows stays raw"


def _quotes(source: str) -> Iterator[str]:
    lines = source.splitlines()
    for before, line in zip(["", *lines], lines):
        opening = OPENING.match(line)
        if before.startswith(">") or not opening:
            continue
        name, anchor = STATEMENT_NAME.match(opening["name"]), opening["anchor"]
        if not name:
            yield f"a quote opens with a bold name that is no statement's: {opening['name']}"
        elif not opening["name"].endswith("."):
            yield f"the name of a statement ends with a full stop: {opening['name']}"
        elif anchor is None and name["kind"] != "Exercise":
            yield f'a statement opens with its anchor, <a id="..."></a>: {opening["name"]}'
        elif anchor is not None and not ANCHOR_FORM.fullmatch(anchor):
            yield f"an anchor is made of a-z, 0-9 and single dashes: {anchor}"


def anchors_of(path: Path) -> set[str]:
    """Return everything in a notebook or Markdown page that a link can point to.

    Args:
        path: An `.ipynb` or `.md` file.
    """
    text = page_markdown(path)
    headings = HEADING.findall(CODE.sub(lambda m: m[0].strip("`"), text))
    plain = {re.sub(r"[*_`]", "", heading).replace(" ", "-") for heading in headings}
    claims = {f"claim-{claim_id}" for claim_id in SETTLED.findall(_code(path))}
    return plain | set(ANCHOR.findall(text)) | claims


def page_markdown(path: Path) -> str:
    """Return the Markdown of a page, that of a notebook's cells joined."""
    if path.suffix != ".ipynb":
        return path.read_text(encoding="utf8")
    cells = json.loads(path.read_text(encoding="utf8"))["cells"]
    return "\n\n".join(source_of(c) for c in cells if c["cell_type"] == "markdown")


def _code(path: Path) -> str:
    if path.suffix != ".ipynb":
        return ""
    cells = json.loads(path.read_text(encoding="utf8"))["cells"]
    return "\n".join(source_of(c) for c in cells if c["cell_type"] == "code")


def link_problems(path: Path) -> list[str]:
    """Return the links of a page that lead nowhere when it is opened as a file.

    Args:
        path: An `.ipynb` or `.md` file.
    """
    found = []
    for link in LINK.findall(MATH.sub("", CODE.sub("", page_markdown(path)))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        if not target.exists():
            found.append(f"{link}: no such file")
        elif anchor and anchor not in anchors_of(target):
            found.append(f"{link}: no such anchor in {target.name}")
    return found


def clear(path: Path) -> None:
    """Take outputs, counts and what front ends remember out of a stored notebook.

    Args:
        path: An `.ipynb` file.
    """
    notebook = json.loads(path.read_text(encoding="utf8"))
    kernel = notebook["metadata"].get("kernelspec", {})
    # Without its name GitHub shows the code uncoloured; the rest changes with every machine.
    notebook["metadata"] = {"kernelspec": kernel, "language_info": {"name": "python"}}
    for cell in notebook["cells"]:
        cell["metadata"] = {k: v for k, v in cell["metadata"].items() if k == "tags"}
        if cell["cell_type"] == "code":
            cell.update(outputs=[], execution_count=None)
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    if text != path.read_text(encoding="utf8"):
        path.write_text(text, encoding="utf8")


def _unreadable(path: Path) -> Iterator[str]:
    try:
        json.loads(path.read_text(encoding="utf8"))["cells"]
    except OSError as error:
        yield f"{path}: cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError):
        yield f"{path}: this is no notebook; save it from Jupyter, or take it back from git"


def main(arguments: list[str]) -> int:
    """Check the named notebooks, or all of the book; return the exit status."""
    paths = [argument for argument in arguments if argument != "--clear"]
    chosen = [Path(p) for p in paths] or [page_source(ROOT, doc) for doc in notebooks(ROOT)]
    unreadable = [line for path in chosen for line in _unreadable(path)]
    if unreadable:
        print("\n".join(unreadable))
        return 1
    if "--clear" in arguments:
        for path in chosen:
            clear(path)
    problems = [
        f"{path}: {problem}"
        for path in chosen
        for problem in [
            *notebook_problems(json.loads(path.read_text(encoding="utf8"))),
            *link_problems(path),
        ]
    ]
    print("\n".join(problems) or f"{len(chosen)} notebooks keep the rules")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

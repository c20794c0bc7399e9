r"""Symbols: links from the chapters to the one table that says what each of them means.

The table stands in a notebook, as plain Markdown, below a heading `## Symbols`. Each `###` under
it says for which parts of the book its rows are (`### In Parts I and III: ...`). The first formula
of a row is a symbol up to its relation (`$\zeta = n^\nu$` defines ζ); further ones, after commas,
are symbols of their own or, where they hold a relation, formulas that mean it as they stand. Words
are told apart by commas if there are as many as symbols. A row whose first cell links to chapters
is for these alone.
"""

import html
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform

from .anchors import make_linkable
from .plain_math import plain, plain_text

PAGE = "chapters/how-to-read"
HEADING = "Symbols"
FORMULA = re.compile(r"\$(?!\s)([^$\n]+?)\$")
RELATION = re.compile(
    r"\s*(?:[=<>]|\\(?:ge|le|ne|neq|approx|sim|in|to|gg|ll|propto|lesssim|gtrsim)(?![A-Za-z])).*$",
    re.DOTALL,
)
# What has more words is a description, which nobody looks up in an index.
TERM_WORDS = 3
# The statement at which a word is defined.
HOME = re.compile(r"\]\(([\w-]+)\.ipynb#([^)\s]+)\)")
CHAPTER = re.compile(r"\]\(([\w-]+)\.ipynb\)")
LINKED = re.compile(r"\[([^\]]*)\]\([^)]*\)")
PART = re.compile(r"\b(I{1,3}|IV|V)\b")
# Letters inside these are no symbols.
WORDS = re.compile(
    r"\\(?:operatorname|mathrm|text|mathit|begin|end)\*?\{[^{}]*\}|\\math\w+ ?\{?\w\}?"
)


@dataclass(frozen=True)
class Symbol:
    """One symbol of the table.

    Attributes:
        latex: The symbol, or the whole formula if `exact`.
        word: What it stands for, as Markdown.
        anchor: The row that explains it.
        parts: The parts of the book that use it so, as Roman numbers.
        chapters: The only chapters that do, if the row names any.
        exact: Only this formula as a whole means it.
    """

    latex: str
    word: str
    anchor: str
    parts: frozenset[str]
    chapters: frozenset[str]
    exact: bool = False

    @property
    def home(self) -> tuple[str, str] | None:
        """The chapter and the anchor at which it is defined, if its word leads there."""
        found = HOME.search(self.word)
        return (found[1], found[2]) if found else None

    @property
    def title(self) -> str:
        """What a reader sees when pointing at the symbol, such as `S₁: residue spike`."""
        return f"{plain(self.latex)}: {plain_text(self.word)}"


@dataclass
class Table:
    """The rows of the symbols' section, in the order of the page.

    Attributes:
        rows: For each table its rows, each a list of symbols.
    """

    rows: list[list[list[Symbol]]] = field(default_factory=list)

    def symbols(self) -> Iterator[Symbol]:
        """Return all symbols, row by row."""
        return (symbol for table in self.rows for row in table for symbol in row)

    def for_chapter(self, chapter: str, part: str) -> dict[str, Symbol]:
        """Return the symbols that a chapter uses as the table says, by their LaTeX.

        Args:
            chapter: The notebook's name without suffix.
            part: The part of the book it is in, as a Roman number.
        """
        special = [s for s in self.symbols() if chapter in s.chapters]
        general = [s for s in self.symbols() if not s.chapters and part in s.parts]
        chosen = {s.latex: s for s in [*reversed(general), *special]}
        return {s.latex: s for s in self.symbols() if chosen.get(s.latex) is s}


def read_table(text: str) -> Table:
    r"""Read the symbols from the Markdown of the section.

    Example:
        >>> text = "### In Part I\n\n| symbol | word |\n|---|---|\n| $q$, $z$ | spike, part |"
        >>> [symbol.title for symbol in read_table(text).symbols()]
        ['q: spike', 'z: part']
    """
    table, parts, anchors = Table(), frozenset(), {}
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("### "):
            parts = frozenset(PART.findall(line.split(":")[0]))
        if not line.startswith("|") or set(line) <= set("|-: "):
            continue
        if not lines[number - 1].startswith("|"):
            table.rows.append([])  # the head of a table
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        table.rows[-1].append(_row(cells[0], cells[1], parts, anchors))
    return table


def _row(cell: str, words: str, parts: frozenset[str], anchors: dict[str, int]) -> list[Symbol]:
    formulas = [normal(formula) for formula in FORMULA.findall(cell)]
    split = _split(words)
    meanings = split if len(split) == len(formulas) else [words] * len(formulas)
    first = FORMULA.sub("", re.split("[:;(,]", LINKED.sub(r"\1", words))[0])
    name = "-".join(re.findall(r"[a-z0-9]+", first.lower())[:4])
    anchors[name] = anchors.get(name, 0) + 1
    anchor = f"symbol-{name}" + (f"-{anchors[name]}" if anchors[name] > 1 else "")
    chapters = frozenset(CHAPTER.findall(cell))
    found = []
    for number, (formula, word) in enumerate(zip(formulas, meanings)):
        symbol = formula if number and RELATION.search(formula) else head(formula)
        exact = symbol == formula and RELATION.search(formula) is not None
        found.append(Symbol(symbol, word, anchor, parts, chapters, exact))
    return found


def _split(words: str) -> list[str]:
    """Split at commas outside of formulas."""
    hidden = FORMULA.sub(lambda m: m[0].replace(",", "\0"), words)
    return [part.strip().replace("\0", ",") for part in hidden.split(",")]


def normal(latex: str) -> str:
    """Return a formula without the spaces that do not change its meaning."""
    return re.sub(r"\s+", " ", re.sub(r"\\[,;!]", " ", latex)).strip()


def head(latex: str) -> str:
    r"""Return what stands before the first relation of a formula.

    Example:
        >>> head(r"\nu = 3/8")
        '\\nu'
    """
    return RELATION.sub("", normal(latex))


def meant(latex: str, known: dict[str, Symbol]) -> Symbol | None:
    """Return the symbol that a formula is, or that it begins with, or None."""
    whole = known.get(normal(latex))
    if whole is not None:
        return whole
    symbol = known.get(head(latex))
    return None if symbol is None or symbol.exact else symbol


def occurring(formulas: Iterable[str], known: dict[str, Symbol]) -> list[Symbol]:
    """Return the symbols that formulas contain, in the order of the table.

    Args:
        formulas: The LaTeX of all formulas of a chapter.
        known: The symbols by their LaTeX.
    """
    texts = [normal(formula) for formula in formulas]
    stripped = "\n".join(WORDS.sub(" ", text) for text in texts)
    together = "\n".join(texts)
    found = []
    for latex, symbol in known.items():
        # A letter within a command, or with another index or prime, is another symbol.
        pattern = rf"(?<![A-Za-z\\]){re.escape(latex)}(?![A-Za-z_'])"
        where = together if latex.startswith("\\math") else stripped
        hit = latex in texts if symbol.exact else re.search(pattern, where)
        if hit:
            found.append(symbol)
    return found


def section_of(notebook: dict[str, Any]) -> str:
    """Return the Markdown of the symbols' section of a notebook, "" if it has none."""
    text = "\n\n".join(c["source"] for c in notebook["cells"] if c["cell_type"] == "markdown")
    found = re.search(rf"^## {HEADING}$(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return found[1] if found else ""


def table_of(env: BuildEnvironment) -> Table:
    """Return the book's table of symbols; an empty one for a book without it."""
    if PAGE not in env.found_docs:
        return Table()
    path = Path(env.doc2path(PAGE))
    env.note_dependency(str(path))
    return read_table(section_of(nbformat.read(path, as_version=4)))


def part_of(app: Sphinx, docname: str) -> str:
    """Return the Roman number of the part of the book that a page is in, or ""."""
    for tree in app.config.external_site_map.root.subtrees:
        if docname in [str(item) for item in tree.items]:
            found = PART.search((tree.caption or "").split(":")[0])
            return found[0] if found else ""
    return ""


class SymbolLink(nodes.Inline, nodes.Element):
    """A formula that leads to the row that explains it."""


class SymbolList(nodes.General, nodes.Element):
    """The folded list of a chapter's symbols.

    It holds no text of its own: words that stood on every page would make the search for a
    word find every page.
    """


class SymbolTransform(SphinxTransform):
    """Give the table's rows anchors, and lead each chapter's symbols to them."""

    # After statements and anchors, so that boxes are seen as what they are.
    default_priority = 842

    def apply(self, **kwargs: object) -> None:
        """Treat the page that holds the table, or a chapter that uses it."""
        docname = self.env.docname
        table = table_of(self.env)
        if docname == PAGE:
            self._mark_rows(table)
            return
        part = part_of(self.app, docname)
        if not part:
            return
        known = table.for_chapter(Path(docname).name, part)
        formulas = [m.astext() for m in self.document.findall(_is_formula)]
        symbols = occurring(formulas, known)
        self._index_homes(table, Path(docname).name)
        self._link_first(known)
        self._insert_list(symbols)

    def _mark_rows(self, table: Table) -> None:
        sections = [s for s in self.document.findall(nodes.section) if s[0].astext() == HEADING]
        tables = [t for s in sections for t in s.findall(nodes.table)]
        for node, rows in zip(tables, table.rows):
            body = next(iter(node.findall(nodes.tbody)))
            for row, symbols in zip(body.children, rows):
                if symbols:
                    self._mark(row, symbols)

    def _mark(self, row: nodes.row, symbols: list[Symbol]) -> None:
        anchor = symbols[0].anchor
        row["ids"].append(anchor)
        row["classes"].append("lg-symbol-row")
        self.document.ids[anchor] = row
        make_linkable(self.document, self.env, anchor, symbols[0].title)
        words = dict.fromkeys(_term(symbol.word) for symbol in symbols)
        entries = [("single", word, anchor, "main", None) for word in words if word]
        # Inside the first cell: nothing else may stand between the rows of a table.
        row[0].insert(0, addnodes.index(entries=entries, inline=False))

    def _index_homes(self, table: Table, chapter: str) -> None:
        """Let index and search lead from a word to the statement that defines it."""
        for symbol in table.symbols():
            home, term = symbol.home, _term(symbol.word)
            box = self.document.ids.get(home[1]) if home and home[0] == chapter else None
            if box is not None and term:
                entry = ("single", term, home[1], "main", None)
                box.insert(0, addnodes.index(entries=[entry], inline=False))

    def _link_first(self, known: dict[str, Symbol]) -> None:
        done = set()
        for formula in list(self.document.findall(nodes.math)):
            symbol = meant(formula.astext(), known)
            if symbol is None or not _in_running_text(formula):
                continue
            # Two symbols of a row that share a word are explained once.
            if (symbol.anchor, symbol.word) in done:
                continue
            done.add((symbol.anchor, symbol.word))
            link = SymbolLink(anchor=symbol.anchor, title=symbol.title)
            formula.replace_self(link)
            link += formula

    def _insert_list(self, symbols: list[Symbol]) -> None:
        section = next(iter(self.document.findall(nodes.section)), None)
        if section is None or not symbols:
            return
        places = [i for i, child in enumerate(section) if isinstance(child, nodes.paragraph)]
        if places:
            section.insert(places[0] + 1, SymbolList(rows=_list_rows(symbols)))


def _list_rows(symbols: list[Symbol]) -> list[tuple[list[str], str, str]]:
    """Return formulas, word and anchor of each line of the list: one line a word of a row."""
    lines: dict[tuple[str, str], list[str]] = {}
    for symbol in symbols:
        lines.setdefault((symbol.word, symbol.anchor), []).append(symbol.latex)
    return [(formulas, word, anchor) for (word, anchor), formulas in lines.items()]


def _is_formula(node: nodes.Node) -> bool:
    return isinstance(node, nodes.math | nodes.math_block)


def _in_running_text(formula: nodes.math) -> bool:
    apart = (nodes.title, nodes.reference, nodes.strong, nodes.table, addnodes.pending_xref)
    node = formula.parent
    while node is not None:
        if isinstance(node, apart):
            return False
        node = node.parent
    return True


def _term(word: str) -> str:
    """Return a row's word for the index: without what explains it, "" if that is a description."""
    term = re.split(r"[:;(,]", LINKED.sub(r"\1", word))[0].strip()
    if len(term.split()) > TERM_WORDS or "$" in term:
        return ""
    # As the names of statements begin, so that the index does not list a word twice.
    return term[:1].upper() + term[1:]


def visit_link(translator: Any, node: SymbolLink) -> None:
    """Open the link of a symbol in HTML."""
    page = translator.builder.get_relative_uri(translator.builder.current_docname, PAGE)
    title = html.escape(node["title"])
    translator.body.append(
        f'<a class="lg-symbol" href="{page}#{node["anchor"]}" title="{title}" aria-label="{title}">'
    )


def depart_link(translator: Any, node: SymbolLink) -> None:
    """Close the link of a symbol in HTML."""
    translator.body.append("</a>")


def visit_list(translator: Any, node: SymbolList) -> None:
    """Write the folded list in HTML."""
    page = translator.builder.get_relative_uri(translator.builder.current_docname, PAGE)
    items = "".join(_list_item(page, *row) for row in node["rows"])
    translator.body.append(
        '<details class="lg-symbols"><summary>Symbols used here</summary>'
        f"<ul>{items}</ul></details>"
    )
    raise nodes.SkipNode


def _list_item(page: str, formulas: list[str], word: str, anchor: str) -> str:
    # Typeset formulas have no text that could be a link's name.
    name = html.escape(f"{', '.join(map(plain, formulas))}: {plain_text(word)}")
    link = f'<a href="{page}#{anchor}" aria-label="{name}">{", ".join(map(_math, formulas))}</a>'
    return f"<li>{link} {_words(word)}</li>"


def _math(latex: str) -> str:
    return f'<span class="math notranslate nohighlight">\\({html.escape(latex)}\\)</span>'


def _words(markdown: str) -> str:
    parts = FORMULA.split(LINKED.sub(r"\1", markdown))
    return "".join(_math(p) if i % 2 else html.escape(p) for i, p in enumerate(parts))


def skip(translator: Any, node: nodes.Node) -> None:
    """Leave the list out of other formats."""
    raise nodes.SkipNode


def nothing(translator: Any, node: nodes.Node) -> None:
    """Show only the formula in other formats."""


def setup(app: Sphinx) -> None:
    """Register what this module adds."""
    other = {"latex": (nothing, nothing), "text": (nothing, nothing)}
    app.add_node(SymbolLink, html=(visit_link, depart_link), **other)
    app.add_node(SymbolList, html=(visit_list, None), latex=(skip, None), text=(skip, None))
    app.add_transform(SymbolTransform)

"""Blockquotes that open with a bold name become statements with an anchor and an index entry."""

import re
from dataclasses import dataclass

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

from .anchors import ANCHOR, make_linkable

KINDS = (
    *("Theorem", "Proposition", "Lemma", "Corollary", "Definition", "Assumptions?", "Conjecture"),
    *("Equations?", "Figures?", "Tables?", "Section", "Remark", "Observation", "Claim", "Fact"),
    *("Decomposition", "Identity", "Law", "Bound", "Derivation", "Rule", "Control"),
    *("Experiment", "Question", "Exercise"),
)
# "Figure 7 (a, b) (Input noise)." -> kind, label with its panels, title
PANELS = r"(?: \([a-z](?:, [a-z])*\))?"
NAME = re.compile(
    rf"^(?P<label>(?P<kind>{'|'.join(KINDS)})\b[^()]*?{PANELS})(?: \((?P<title>.+)\))?\.?$"
)
# Every chapter counts its exercises from one, so an index of them would name nothing.
UNINDEXED = {"exercise"}
SHORT = {
    "Theorem": "Thm",
    "Proposition": "Prop",
    "Equation": "Eq",
    "Figure": "Fig",
    "Section": "Sec",
}
# "Equations 13-16", "Figures 3 and 4"
SEVERAL = re.compile(r"^(?P<kind>[A-Z]\w+)s (?P<first>\d+)(?P<to>-| and )(?P<last>\d+)$")


@dataclass(frozen=True)
class Statement:
    """The head of a statement.

    Attributes:
        label: Kind and number, such as `Theorem 3.1`.
        kind: The kind alone and in small letters, such as `theorem`.
        title: What the parentheses hold; may be empty.
        anchor: The identifier that links point to.
    """

    label: str
    kind: str
    title: str
    anchor: str

    @classmethod
    def from_name(cls, name: str, anchor: str = "") -> "Statement | None":
        """Read a bold name; None when it is not the name of a statement.

        Example:
            >>> Statement.from_name("Theorem 3.1 (Rank one).").anchor
            'theorem-3-1'
        """
        found = NAME.match(" ".join(name.split()))
        if not found:
            return None
        label = found["label"]
        derived = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")
        return cls(label, found["kind"].lower(), found["title"] or "", anchor or derived)


class StatementTransform(SphinxTransform):
    """Turn blockquotes that open with a bold name into styled, linkable statements."""

    # Before the domains gather index entries (850) and links inside a page are resolved (879).
    default_priority = 840

    def apply(self, **kwargs: object) -> None:
        """Visit every blockquote of the page."""
        for quote in list(self.document.findall(nodes.block_quote)):
            head = _opening(quote)
            if head is None:
                continue
            anchor_nodes, anchor, bold = head
            statement = Statement.from_name(bold.astext(), anchor)
            if statement is None:
                continue
            for node in anchor_nodes:
                node.parent.remove(node)
            bold["classes"].append("lg-statement-name")
            quote.replace_self(self._container(quote, statement))

    def _container(self, quote: nodes.block_quote, statement: Statement) -> nodes.container:
        classes = ["lg-statement", f"lg-{statement.kind}"]
        box = nodes.container("", *quote.children, classes=classes, ids=[statement.anchor])
        box.source, box.line = quote.source, quote.line
        self._give_way(statement.anchor)
        self.document.ids[statement.anchor] = box
        text = statement.label + (f" ({statement.title})" if statement.title else "")
        make_linkable(self.document, self.env, statement.anchor, text, box.line or 0)
        if statement.kind not in UNINDEXED:
            names = index_names(statement)
            # The search shows what is not "main" after all pages that contain the words.
            entries = [("single", name, statement.anchor, "main", None) for name in names]
            box.insert(0, addnodes.index(entries=entries, inline=False))
        return box

    def _give_way(self, anchor: str) -> None:
        # A chapter titled like its statement got the same identifier first. Links to the heading
        # are looked up by its text, so the heading can take another one.
        section = self.document.ids.get(anchor)
        if section is None:
            return
        other = f"section-{anchor}"
        section["ids"] = [other if name == anchor else name for name in section["ids"]]
        self.document.ids[other] = section
        names = self.document.nameids
        names.update({name: other for name, known in names.items() if known == anchor})
        slugs = getattr(self.document, "myst_slugs", {})
        for slug, (line, known, text) in slugs.items():
            slugs[slug] = (line, other if known == anchor else known, text)


def index_names(statement: Statement) -> list[str]:
    """Return the names under which the index lists a statement.

    A label without a number, such as `Claim`, names nothing where there is a title; and Sphinx
    takes what follows a semicolon for a second level.

    Example:
        >>> index_names(Statement("Law", "law", "Free bulk; after Voiculescu", "law-free"))
        ['Free bulk']
    """
    title = statement.title.partition(";")[0].strip()
    numbered = statement.label.lower() != statement.kind
    return [name for name in (statement.label if numbered or not title else "", title) if name]


def _opening(
    quote: nodes.block_quote,
) -> tuple[list[nodes.Node], str, nodes.strong] | None:
    """Return the nodes of the anchor, its identifier and the bold name a blockquote opens with."""
    if not quote.children or not isinstance(quote[0], nodes.paragraph):
        return None
    anchor, before = "", []
    for node in quote[0]:
        if isinstance(node, nodes.strong):
            return before, anchor, node
        # The parser leaves an empty text in front of leading bold, and raw HTML as it stands.
        if isinstance(node, nodes.raw):
            found = ANCHOR.search(node.astext())
            anchor = found["id"] if found else anchor
        elif node.astext().strip():
            return None
        before.append(node)
    return None


def other_names(label: str) -> list[str]:
    """Return what else a reader may type who looks for a statement.

    Example:
        >>> other_names("Figures 3 and 4")
        ['Figure 3', 'Fig. 3', 'Fig 3', 'Figure 4', 'Fig. 4', 'Fig 4']
    """
    several = SEVERAL.match(label)
    if several:
        first, last = int(several["first"]), int(several["last"])
        numbers = range(first, last + 1) if several["to"] == "-" else (first, last)
        singles = [f"{several['kind']} {number}" for number in numbers]
        return [name for single in singles for name in (single, *other_names(single))]
    kind, _, rest = label.partition(" ")
    short = SHORT.get(kind)
    return [f"{short}. {rest}", f"{short} {rest}"] if short and rest else []


def add_search_names(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Let the search find statements under their other names; a Sphinx event handler.

    The printed index has been gathered before, so it keeps one name for each.
    """
    for index in list(doctree.findall(addnodes.index)):
        names = [(other, e[2]) for e in index["entries"] for other in other_names(e[1])]
        if names:
            entries = [("single", name, anchor, "main", None) for name, anchor in names]
            index.parent.insert(
                index.parent.index(index), addnodes.index(entries=entries, inline=False)
            )

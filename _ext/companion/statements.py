"""Blockquotes that open with a bold name become statements with an anchor and an index entry."""

import re
from dataclasses import dataclass

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

from .anchors import ANCHOR, make_linkable

KINDS = (
    *("Theorem", "Proposition", "Lemma", "Corollary", "Definition", "Assumptions?", "Conjecture"),
    *("Equations?", "Figures?", "Tables?", "Section", "Remark", "Observation", "Claim", "Fact"),
    *("Decomposition", "Identity", "Law", "Bound", "Derivation", "Rule", "Control"),
    *("Experiment", "Question", "Exercise"),
)
# "Theorem 3.1 (Gradient approximation)." -> kind, label, title
NAME = re.compile(rf"^(?P<label>(?P<kind>{'|'.join(KINDS)})\b[^()]*?)(?: \((?P<title>.+)\))?\.?$")
# Every chapter counts its exercises from one, so an index of them would name nothing.
UNINDEXED = {"exercise"}


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
            names = [statement.label, *([statement.title] if statement.title else [])]
            entries = [("single", name, statement.anchor, "", None) for name in names]
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

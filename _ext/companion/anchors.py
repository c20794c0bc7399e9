"""Anchors written as `<a id="..."></a>`, which links of the book can point to."""

import re

from docutils import nodes
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform

ANCHOR = re.compile(r"""<a\s+(?:id|name)=["'](?P<id>[^"']+)["']\s*/?>""")
# What an anchor in a text stands for: the whole entry of a list, or else the paragraph.
HOLDERS = (nodes.list_item, nodes.paragraph)


def make_linkable(
    document: nodes.document, env: BuildEnvironment, anchor: str, text: str, line: int = 0
) -> None:
    """Let links of Markdown pages find an anchor.

    Args:
        document: The page that has the anchor.
        env: The environment of the build.
        anchor: The identifier; some node of the page must carry it.
        text: What a link without a text of its own shows.
        line: Where the anchor stands.
    """
    # MyST looks for the anchor of a link in these two tables and in no other place.
    entry = (line, anchor, text)
    slugs = getattr(document, "myst_slugs", {})
    slugs[anchor] = entry
    document.myst_slugs = slugs
    env.metadata[env.docname].setdefault("myst_slugs", {})[anchor] = entry


class AnchorTransform(SphinxTransform):
    """Give the identifier of an anchor in the text to the entry or paragraph that it opens."""

    # After statements took theirs (840), before links inside a page are resolved (879).
    default_priority = 841

    def apply(self, **kwargs: object) -> None:
        """Visit every piece of raw HTML of the page."""
        for raw in list(self.document.findall(nodes.raw)):
            found = ANCHOR.fullmatch(raw.astext().strip())
            # A closing tag that went with its anchor is in no list of children any more.
            holder = _holder(raw) if found else None
            if holder is None:
                continue
            anchor = found["id"]
            closing = raw.next_node(descend=False, siblings=True)
            if isinstance(closing, nodes.raw) and closing.astext() == "</a>":
                closing.parent.remove(closing)
            raw.parent.remove(raw)
            holder["ids"].append(anchor)
            self.document.ids[anchor] = holder
            make_linkable(self.document, self.env, anchor, anchor, holder.line or 0)


def _holder(node: nodes.Node) -> nodes.Element | None:
    """Return what the anchor opens, or None where it stands in the middle."""
    paragraph = node.parent
    if not isinstance(paragraph, HOLDERS):
        return None
    before = paragraph.children[: paragraph.index(node)]
    if any(child.astext().strip() for child in before):
        return None
    outer = paragraph.parent
    return outer if isinstance(outer, HOLDERS) and outer.index(paragraph) == 0 else paragraph

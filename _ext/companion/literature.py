"""The page of the literature as a file of BibTeX entries, so that nothing is written twice.

An entry of the page is one line of a list,

    - <a id="key"></a>A. Author, B. Author (2020). *Title.* Venue 1(2), 3-4. [link](...). Why.

and becomes an entry of ``references.bib`` beside the built pages.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import ConfigError

PAGE = "bibliography"
ENTRY = re.compile(
    r'^- <a id="(?P<key>[a-z0-9-]+)"></a>(?P<authors>[^*]+?) \((?P<year>\d{4})\)\. '
    r"\*(?P<title>[^*]+?)\.?\* (?P<rest>.+)$"
)
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)\. ")
# "Annals of Probability 33(5), 1643–1697": what a journal's line ends with.
JOURNAL = re.compile(
    r"^(?P<journal>.+?) (?P<volume>\d+)(?:\((?P<number>\d+)\))?(?:, (?P<pages>[\w–]+))?$"
)
INITIALS = re.compile(r"^((?:[A-Z]\.[- ]?)+) ?(.+)$")


@dataclass(frozen=True)
class Entry:
    """One source.

    Attributes:
        key: Its anchor on the page.
        authors: `A. Author` each.
        year: When it appeared.
        title: Without a full stop.
        venue: Journal or proceedings with volume and pages; empty for a preprint.
        link: What the link shows, such as `arXiv:1901.08244`; empty without one.
        address: Where the link leads.
        why: What the page says about it.
    """

    key: str
    authors: tuple[str, ...]
    year: str
    title: str
    venue: str
    link: str
    address: str
    why: str

    def bibtex(self) -> str:
        """Return the entry as BibTeX.

        Example:
            >>> text = '- <a id="k"></a>A. B. Cee (2001). *On D.* Journal of E 1(2), 3–4. Why.'
            >>> print(entries(text)[0].bibtex())
            @article{k,
              author = {{Cee}, A. B.},
              title = {{On D}},
              year = {2001},
              journal = {Journal of E},
              volume = {1},
              number = {2},
              pages = {3--4},
            }
        """
        kind, fields = self._venue_fields()
        fields = {
            "author": " and ".join(_last_name_first(author) for author in self.authors),
            "title": f"{{{self.title}}}",
            "year": self.year,
            **fields,
            **self._link_fields(),
        }
        lines = "".join(f"  {name} = {{{value}}},\n" for name, value in fields.items())
        return f"@{kind}{{{self.key},\n{lines}}}"

    def _venue_fields(self) -> tuple[str, dict[str, str]]:
        if not self.venue:
            return "misc", {}
        # A conference has its short name in parentheses, a part of a book an "In".
        if re.search(r"\([A-Za-z]+\)|^In ", self.venue):
            book, comma, pages = self.venue.removeprefix("In ").rpartition(", ")
            if not re.fullmatch(r"\d+–\d+", pages):
                return "inproceedings", {"booktitle": f"{book}{comma}{pages}"}
            return "inproceedings", {"booktitle": book, "pages": pages.replace("–", "--")}
        if self.venue.startswith("Technical report"):
            return "techreport", {"institution": self.venue.split(", ", 1)[1]}
        found = JOURNAL.match(self.venue)
        fields = found.groupdict() if found else {"journal": self.venue}
        filled = {name: value.replace("–", "--") for name, value in fields.items() if value}
        return "article", filled

    def _link_fields(self) -> dict[str, str]:
        name, _, number = self.link.partition(":")
        if name == "arXiv":
            return {"eprint": number, "archiveprefix": "arXiv", "url": self.address}
        if name == "doi":
            return {"doi": number, "url": self.address}
        return {"url": self.address} if self.address else {}


def entries(text: str) -> list[Entry]:
    """Read the entries of the page.

    Args:
        text: The page's Markdown.

    Raises:
        ValueError: A line that opens as an entry is not written as one.
    """
    lines = [line for line in text.splitlines() if line.startswith("- <a id=")]
    return [_entry(line) for line in lines]


def _entry(line: str) -> Entry:
    found = ENTRY.match(line)
    if not found:
        form = '- <a id="key"></a>A. Author (2020). *Title.* Venue. [link](address). Why.'
        raise ValueError(f"not an entry of the literature: {line[:80]}; write it as {form}")
    link = LINK.search(found["rest"])
    if link:
        venue, why = found["rest"][: link.start()], found["rest"][link.end() :]
    else:
        venue, _, why = found["rest"].partition(". ")
    return Entry(
        found["key"],
        tuple(found["authors"].split(", ")),
        found["year"],
        found["title"],
        venue.strip().removesuffix("."),
        link[1] if link else "",
        link[2] if link else "",
        why.strip(),
    )


def _last_name_first(author: str) -> str:
    found = INITIALS.match(author)
    return f"{{{found[2]}}}, {found[1].strip()}" if found else f"{{{author}}}"


def write_bib(app: Sphinx, error: Exception | None) -> None:
    """Write references.bib beside the pages; a Sphinx event handler."""
    source = Path(app.srcdir, f"{PAGE}.md")
    if error is not None or app.builder.format != "html" or PAGE not in app.env.found_docs:
        return
    try:
        known = entries(source.read_text(encoding="utf8"))
    except ValueError as problem:
        raise ConfigError(str(problem)) from problem
    text = "\n\n".join(entry.bibtex() for entry in known)
    Path(app.outdir, "references.bib").write_text(text + "\n", encoding="utf8")

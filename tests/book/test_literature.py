"""The page of the literature: whole, used, cited rightly, and the same as BibTeX."""

import re
import unicodedata

import pytest
from book_sources import notebooks, page_source, toc_documents
from companion.literature import entries
from notebook_rules import page_markdown
from pybtex.database import parse_string
from small_books import ROOT

PAGE = (ROOT / "bibliography.md").read_text(encoding="utf8")
ENTRIES = entries(PAGE)
USED = re.compile(r"bibliography\.md#([\w-]+)")
# "Baik and Silverstein's (2006)", "Ghorbani et al., 2020", "Papyan 2018".
CITED = re.compile(
    r"(?P<name>[A-Z][A-Za-zÀ-ž-]+)(?:'s)?(?: et al\.| and others)?,? ?\n? *"
    r"\(?(?P<year>(?:19|20)\d\d)(?=[\s),;.:]|$)"
)
# What stands before a year and is no author.
NO_AUTHORS = {"ICML", "NeurIPS", "NIPS", "ICLR", "Statistician", "Stability"}


def plain(name):
    return unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()


def years_of(entry):
    """The year it appeared and, for a preprint, the year of its number."""
    number = re.match(r"arXiv:(\d\d)\d\d\.", entry.link)
    return {entry.year, *([f"20{number[1]}"] if number else [])}


def authors_of(entry):
    return {plain(word) for author in entry.authors for word in author.split() if "." not in word}


def sources_that_cite():
    for document in toc_documents(ROOT):
        yield document, page_markdown(page_source(ROOT, document))
    for folder in ("lowgrad_utils", "assignments", "course"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf8")
    yield "claims.toml", (ROOT / "lowgrad_utils" / "claims.toml").read_text(encoding="utf8")


def citations():
    for place, text in sources_that_cite():
        for found in CITED.finditer(text):
            if found["name"] not in NO_AUTHORS:
                yield place, found["name"], found["year"]


def test_citations_are_found_in_the_sources():
    cited = {(name, year) for _, name, year in citations()}
    assert {("Papyan", "2019"), ("Silverstein", "2006"), ("Ghorbani", "2020")} <= cited


def test_everything_cited_is_on_the_page():
    known = {(name, year) for e in ENTRIES for name in authors_of(e) for year in years_of(e)}
    missing = {
        f"{place}: {name} {year}"
        for place, name, year in citations()
        if (plain(name), year) not in known
    }
    assert missing == set()


def test_every_line_of_the_list_is_an_entry_of_its_own():
    lines = [line for line in PAGE.splitlines() if line.startswith("- ")]
    assert len(lines) == len(ENTRIES) > 0
    keys = [entry.key for entry in ENTRIES]
    assert len(set(keys)) == len(keys)
    addresses = [entry.address for entry in ENTRIES if entry.address]
    assert len(set(addresses)) == len(addresses)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.key)
def test_an_entry_agrees_with_itself(entry):
    names, year = entry.key.rsplit("-", 1)
    assert year == entry.year
    # Keys may join a name of two words, and write umlauts out.
    first = re.sub("[ -]", "", plain(re.sub(r"^(?:[A-Z]\.[- ]?)+ ?", "", entry.authors[0])))
    joined = names.replace("-", "")
    assert joined.startswith(first) or joined.replace("oe", "o").startswith(first)
    assert all(re.match(r"^(?:[A-Z]\.[- ]?)+ ?\S", author) for author in entry.authors)
    assert entry.why.endswith(".") and len(entry.why.split()) >= 1
    if entry.link.startswith("arXiv:"):
        assert entry.address == f"https://arxiv.org/abs/{entry.link.removeprefix('arXiv:')}"
    if entry.link.startswith("doi:"):
        doi = entry.link.removeprefix("doi:").replace("(", "%28").replace(")", "%29")
        assert entry.address == f"https://doi.org/{doi}"
    # A preprint cannot have appeared before its number was given.
    number = re.match(r"arXiv:(\d\d)\d\d\.", entry.link)
    assert not number or int(f"20{number[1]}") <= int(entry.year)


def test_every_anchor_that_is_used_exists_and_every_entry_is_used():
    used = set()
    for document in notebooks(ROOT):
        text = page_markdown(page_source(ROOT, document))
        used |= set(USED.findall(text))
    keys = {entry.key for entry in ENTRIES}
    assert used - keys == set()
    assert keys - used == set()


def test_an_entry_that_is_written_otherwise_is_told():
    with pytest.raises(ValueError, match="not an entry"):
        entries('- <a id="x-2000"></a>A. Author. *No year.* Why.')


def test_bibtex_says_the_same(html):
    text = (html / "references.bib").read_text(encoding="utf8")
    read = parse_string(text, "bibtex").entries
    assert list(read) == [entry.key for entry in ENTRIES]
    for entry in ENTRIES:
        fields = read[entry.key].fields
        assert fields["title"].strip("{}") == entry.title
        assert fields["year"] == entry.year
        assert len(read[entry.key].persons["author"]) == len(entry.authors)
        assert entry.address == fields.get("url", "")
    paper = read["papyan-2019"]
    assert paper.type == "inproceedings"
    assert paper.fields["pages"] == "5012--5021"
    law = read["baik-2005"]
    assert law.type == "article"
    assert (law.fields["volume"], law.fields["number"]) == ("33", "5")
    assert [str(p.last_names[-1]) for p in law.persons["author"]][1].strip("{}") == "Ben Arous"

"""The built pages as files: links, anchors, pictures, and nothing from another host."""

import re
from urllib.parse import unquote, urlparse

import pytest
from book_sources import notebooks, page_source, toc_documents
from bs4 import BeautifulSoup
from notebook_rules import OPENING, STATEMENT_NAME, page_markdown
from small_books import ROOT

PAGES = [*toc_documents(ROOT), "genindex", "search"]
# Attributes by which a page loads something, as opposed to linking to it.
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


@pytest.fixture(scope="module")
def soups(html):
    """Every page, parsed."""
    return {p: BeautifulSoup((html / f"{p}.html").read_text(), "html.parser") for p in PAGES}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page, soups, html):
    broken = []
    for link in soups[page].select("a[href]"):
        address = urlparse(link["href"])
        if address.scheme or link["href"] == "#":
            continue
        path = (
            (html / page).parent / unquote(address.path) if address.path else html / f"{page}.html"
        )
        if not path.is_file():
            broken.append(link["href"])
        elif address.fragment and path.suffix == ".html":
            target = soups[path.resolve().relative_to(html.resolve()).with_suffix("").as_posix()]
            anchor = unquote(address.fragment)
            if not (target.find(id=anchor) or target.find(attrs={"name": anchor})):
                broken.append(link["href"])
    assert broken == []


@pytest.mark.parametrize("page", PAGES)
def test_nothing_is_loaded_from_another_host(page, soups):
    loaded = [
        element[attribute]
        for tag, attribute in LOADED.items()
        for element in soups[page].select(f"{tag}[{attribute}]")
    ]
    assert loaded
    assert [address for address in loaded if re.match(r"(https?:)?//", address)] == []


def test_styles_load_nothing_from_another_host(html):
    for path in html.rglob("*.css"):
        text = path.read_text(encoding="utf8")
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", text), path


@pytest.mark.parametrize("page", PAGES)
def test_pictures_have_a_text_of_their_own(page, soups):
    for image in soups[page].select("img"):
        alt = image.get("alt", "").strip()
        assert alt, image
        # Left alone, Sphinx writes the file's path there.
        assert not re.search(r"\.(png|svg|webp|jpe?g)$", alt), alt


@pytest.mark.parametrize("page", notebooks(ROOT))
def test_no_table_begins_with_a_column_that_only_counts(page, soups):
    for table in soups[page].select("table.dataframe"):
        rows = table.select("tbody tr")
        first = [head.text.strip() for row in rows if (head := row.find("th"))]
        assert first != [str(k) for k in range(len(first))] or len(first) < 2, table.text[:200]


def test_pages_have_an_icon(soups, html):
    for page, soup in soups.items():
        icon = soup.select_one("link[rel~=icon]")
        assert (html / page).parent.joinpath(icon["href"].split("?")[0]).is_file(), page


def _statements():
    for document in notebooks(ROOT):
        for line in page_markdown(page_source(ROOT, document)).splitlines():
            opening = OPENING.match(line)
            if opening and opening["anchor"]:
                yield document, opening["anchor"], STATEMENT_NAME.match(opening["name"])["label"]


def test_statements_are_boxes_with_anchor_and_index_entry(soups):
    statements = list(_statements())
    assert statements
    entries = {
        link["href"].rsplit("/", 1)[-1] for link in soups["genindex"].select("table a[href]")
    }
    for document, anchor, label in statements:
        box = soups[document].find(id=anchor)
        assert "lg-statement" in box["class"], anchor
        assert box.select_one(".lg-statement-name").text.startswith(label)
        if not label.startswith("Exercise"):
            assert f"{document.rsplit('/', 1)[-1]}.html#{anchor}" in entries


def test_the_index_lists_each_name_once_and_no_bare_kinds(soups):
    items = soups["genindex"].select("table.genindextable > tr > td > ul > li")
    names = [item.find(string=True).strip() for item in items]
    assert len(names) > 50
    small = [name.lower() for name in names]
    assert sorted(set(small)) == sorted(small)
    assert not set(small) & {"claim", "law", "fact", "identity", "bound", "derivation"}


def test_the_index_is_reached_from_the_results(soups):
    for page in ("what-holds", "paper-1", "paper-2"):
        assert soups[page].select_one("article a[href='genindex.html']"), page

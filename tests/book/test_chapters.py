"""Every chapter has what a reader looks for at its beginning and at its end."""

import json
import re
from pathlib import PurePosixPath

import pytest
from book_sources import notebooks, page_source, toc_documents
from notebook_rules import page_markdown, source_of
from small_books import ROOT

CHAPTERS = notebooks(ROOT)
LINK = re.compile(r"\]\(([^)#\s]+)")
READING = re.compile(r"^- \[[^\]]+\]\(\.\./bibliography\.md#[\w-]+\): \w.+\.$")


def first_cell(document):
    return source_of(json.loads(page_source(ROOT, document).read_text())["cells"][0])


def sections(document):
    """The text below each second-level heading, by its title, in order."""
    parts = re.split(r"^## (.+)$", page_markdown(page_source(ROOT, document)), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2]))


def document_of(link):
    """The document that a link of a chapter leads to."""
    path = PurePosixPath("chapters") / link
    parts = [part for part in path.parts if part != ".."]
    return "/".join(parts[1:] if ".." in path.parts else parts).rsplit(".", 1)[0]


@pytest.mark.parametrize("document", CHAPTERS)
def test_a_chapter_says_at_once_what_it_is_and_costs(document):
    text = first_cell(document)
    assert re.search(r"\n\n\*\*What you will learn\.\*\* \w", text)
    assert re.search(r"^Time: about \d+ minutes\.", text, flags=re.M)


@pytest.mark.parametrize("document", CHAPTERS[1:])
def test_what_comes_before_comes_before(document):
    # A link's own dot does not end the sentence.
    sentence = re.search(r"Before this: ((?:\[[^\]]*\]\([^)]*\)|[^.\[])+)", first_cell(document))
    assert sentence, "a chapter says what to read before it"
    links = [document_of(link) for link in LINK.findall(sentence[1])]
    assert links
    place = CHAPTERS.index(document)
    assert [link for link in links if link not in CHAPTERS[:place]] == []


@pytest.mark.parametrize("document", CHAPTERS)
def test_a_chapter_ends_with_exercises_summary_and_reading(document):
    titles = list(sections(document))
    assert titles[-3:] == ["Exercises", "Summary", "Further reading"]


@pytest.mark.parametrize("document", CHAPTERS)
def test_further_reading_is_two_to_four_sources_with_a_sentence_each(document):
    entries = [line for line in sections(document)["Further reading"].splitlines() if "- " in line]
    assert 2 <= len(entries) <= 4
    assert [entry for entry in entries if not READING.match(entry)] == []


def test_no_two_chapters_have_the_same_further_reading():
    lists = [
        tuple(sorted(re.findall(r"^- .*?#([\w-]+)\)", sections(doc)["Further reading"], re.M)))
        for doc in CHAPTERS
    ]
    assert len(set(lists)) == len(lists)


@pytest.mark.parametrize("document", CHAPTERS)
def test_next_is_what_comes_next(document):
    last = page_markdown(page_source(ROOT, document)).rstrip().splitlines()[-1]
    assert last.startswith("Next: ")
    place = CHAPTERS.index(document) + 1
    # After the last chapter comes the page with all verdicts.
    following = CHAPTERS[place] if place < len(CHAPTERS) else "what-holds"
    assert document_of(LINK.search(last)[1]) == following
    assert following in toc_documents(ROOT)

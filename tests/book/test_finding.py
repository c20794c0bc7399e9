"""Finding one's way in a real browser: the search, the page of verdicts, and symbols."""

import pytest

QUERIES = [
    ("Theorem 3.1", "chapters/theorem-3-1.html#theorem-3-1"),
    ("theorem 3.1", "chapters/theorem-3-1.html#theorem-3-1"),
    ("Proposition 3.1", "chapters/relu.html#proposition-3-1"),
    ("prop. 4.2", "chapters/input-noise.html#proposition-4-2"),
    ("Lemma 2.1", "chapters/gauss-newton-algebra.html#lemma-2-1"),
    ("Figure 7", "chapters/outliers.html#figure-7"),
    ("Figure 3", "chapters/clusters.html#figures-3-4"),
    ("Eq. 29", "chapters/hessian-sweep.html#equation-29"),
    ("equation 14", "chapters/gauss-newton-algebra.html#equations-13-16"),
    ("residue spike", "chapters/gradient.html#decomposition"),
    ("class centre", "chapters/three-levels.html#equation-28"),
    ("third spike", "chapters/third-spike.html#proposition-h-1"),
]
# How far down a reader looks.
FIRST = 4


def visible_rows(page):
    return page.locator(".lg-table tbody tr:visible")


def field(page, name):
    return page.locator(f'[data-lg-filter="{name}"]')


def counted(page):
    texts = page.locator(".lg-counts li:visible .lg-count").all_inner_texts()
    return sum(int(text) for text in texts)


@pytest.mark.parametrize(("words", "target"), QUERIES)
def test_search_leads_to_the_statement(words, target, open_page):
    page = open_page(f"search.html?q={words.replace(' ', '+')}")
    page.locator("#search-results .search li a").first.wait_for()
    page.wait_for_function(
        "() => /found|finished/i.test(document.querySelector('#search-results').textContent)"
    )
    # Each result fetches its page for a summary; leaving now would cut that off.
    page.wait_for_load_state("networkidle")
    links = page.locator("#search-results .search > li > a").all()[:FIRST]
    # The results add the words to mark them in the page.
    addresses = [link.get_attribute("href").replace("?highlight=", "") for link in links]
    assert target in addresses, addresses
    links[addresses.index(target)].click()
    page.wait_for_url(f"**{target[target.index('#') :]}")
    assert page.locator(f"[id='{target.partition('#')[2]}']").is_visible()
    assert page.troubles == []


def test_the_ledger_is_filtered_by_each_field_and_counts_follow(open_page):
    page = open_page("what-holds.html")
    total = visible_rows(page).count()
    assert counted(page) == total > 0
    assert page.get_by_role("status").inner_text() == f"{total} of {total} rows shown"
    for name, value in [
        ("paper", "tlh"),
        ("chapter", "outliers"),
        ("chapter", "Part III"),
        ("kind", "rate"),
        ("verdict", "fails"),
    ]:
        field(page, name).select_option(value)
        shown = visible_rows(page).count()
        assert 0 < shown < total, name
        assert counted(page) == shown
        assert page.get_by_role("status").inner_text() == f"{shown} of {total} rows shown"
        page.get_by_role("button", name="Show all").click()
        assert visible_rows(page).count() == total
    field(page, "paper").select_option("lrg")
    ids = [row.get_attribute("id") for row in visible_rows(page).all()]
    assert ids and all(name.startswith("row-lrg.") for name in ids)
    assert page.locator(".lg-table:visible").count() == 1
    assert page.troubles == []


def test_fields_work_together_and_the_address_keeps_them(open_page):
    page = open_page("what-holds.html")
    field(page, "verdict").select_option("fails")
    field(page, "find").fill("outlier")
    shown = visible_rows(page).count()
    assert page.url.endswith("what-holds.html?find=outlier&verdict=fails")
    again = open_page(page.url.rsplit("/", 1)[1])
    assert visible_rows(again).count() == shown
    assert field(again, "verdict").input_value() == "fails"
    assert field(again, "find").input_value() == "outlier"


def test_an_address_with_an_unknown_value_hides_nothing(open_page):
    page = open_page("what-holds.html?verdict=nonsense")
    assert visible_rows(page).count() == page.locator(".lg-table tbody tr").count()


@pytest.mark.parametrize("query", ["", "?paper=lrg"])
def test_an_address_leads_to_its_row(query, open_page):
    page = open_page(f"what-holds.html{query}#tlh.fig-7")
    row = page.locator("[id='row-tlh.fig-7']")
    assert row.is_visible()
    box, height = row.bounding_box(), page.viewport_size["height"]
    assert 0 <= box["y"] + box["height"] / 2 <= height
    assert page.troubles == []


def test_the_ledger_works_by_keyboard(open_page):
    page = open_page("what-holds.html")
    total = visible_rows(page).count()
    field(page, "find").focus()
    page.keyboard.type("tlh.fig-7")
    assert 0 < visible_rows(page).count() < total
    for label in ("Paper", "Chapter", "Kind", "Verdict"):
        page.keyboard.press("Tab")
        assert page.evaluate("() => document.activeElement.labels[0].innerText").startswith(label)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert visible_rows(page).count() == total


@pytest.mark.parametrize(("letter", "name"), [("α", "alpha"), ("ν", "nu"), ("Θ", "Theta")])
def test_letters_are_found_by_their_names_too(letter, name, open_page):
    page = open_page("what-holds.html")
    found = {}
    for words in (letter, name):
        field(page, "find").fill(words)
        found[words] = {row.get_attribute("id") for row in visible_rows(page).all()}
    assert found[letter] and found[letter] <= found[name]
    # Only for the filter: the name is neither shown nor read out.
    field(page, "find").fill("lrg.thm-3.1.error-rate")
    row = page.locator("[id='row-lrg.thm-3.1.error-rate']")
    assert "alpha" in row.get_attribute("data-spelled")
    assert "alpha" not in page.locator(".lg-table:visible").first.aria_snapshot()
    assert "α" in page.locator(".lg-table:visible").first.aria_snapshot()


@pytest.mark.parametrize("word", ["alpha", "lambda"])
def test_search_leads_to_the_ledger_by_a_letters_name(word, open_page):
    page = open_page(f"search.html?q={word}")
    page.locator("#search-results .search li a[href^='what-holds.html']").wait_for()


def test_a_card_on_a_narrow_screen_unfolds(open_page):
    page = open_page("what-holds.html", width=400)
    row = page.locator("[id='row-tlh.fig-7']")
    numbers = row.locator("td[data-label='Measured']")
    button = row.get_by_role("button")
    button.wait_for()
    assert row.locator(".lg-verdict").is_visible() and not numbers.is_visible()
    assert "tlh.fig-7" in button.get_attribute("aria-label")
    button.focus()
    page.keyboard.press("Enter")
    assert numbers.is_visible() and button.get_attribute("aria-expanded") == "true"
    page.keyboard.press("Enter")
    assert not numbers.is_visible() and button.get_attribute("aria-expanded") == "false"
    # On a wide screen there is nothing to unfold.
    page.set_viewport_size({"width": 1300, "height": 900})
    assert numbers.is_visible() and not button.is_visible()
    # Who comes for one row sees all of it.
    led = open_page("what-holds.html#tlh.fig-7", width=400)
    assert led.locator("[id='row-tlh.fig-7'] td[data-label='Measured']").is_visible()
    assert page.troubles == led.troubles == []


@pytest.mark.parametrize("width", [400, 1300])
def test_without_a_script_everything_is_shown(width, browser, site):
    size = {"width": width, "height": 900}
    context = browser.new_context(java_script_enabled=False, viewport=size)
    page = context.new_page()
    page.goto(f"{site}/what-holds.html?verdict=fails")
    assert page.locator(".lg-table tbody tr:visible").count() == page.locator("tr[id]").count() > 0
    measured = page.locator("td[data-label='Measured']:not(:empty)")
    assert measured.count() == page.locator("td[data-label='Measured']:visible").count() > 0
    assert not page.locator(".lg-filter").is_visible()
    context.close()


def test_a_statement_shows_its_verdicts_and_leads_to_the_rows(open_page):
    page = open_page("chapters/large-spikes.html")
    box = page.locator("[id='theorem-3-2'] .lg-statement-verdicts")
    assert box.locator("li").count() == 2
    box.locator("a:has(.lg-verdict)").first.click()
    page.wait_for_url("**/what-holds.html#lrg.thm-3.2")
    assert page.locator("[id='row-lrg.thm-3.2']").is_visible()


def test_a_symbol_is_reached_by_keyboard_and_leads_to_its_row(open_page):
    page = open_page("chapters/theorem-3-1.html")
    link = page.locator("a.lg-symbol[title='S₁: residue spike']")
    link.focus()
    assert page.evaluate("() => document.activeElement.className") == "lg-symbol"
    assert page.get_by_role("link", name="S₁: residue spike").count() == 1
    page.keyboard.press("Enter")
    page.wait_for_url("**/how-to-read.html#symbol-residue-spike")
    row = page.locator("[id='symbol-residue-spike']")
    assert row.is_visible()
    assert "data spike" in row.inner_text()
    assert page.troubles == []


def test_the_list_of_symbols_unfolds(open_page):
    page = open_page("chapters/outliers.html", 400)
    symbols = page.locator("details.lg-symbols")
    assert not symbols.locator("li").first.is_visible()
    symbols.locator("summary").focus()
    page.keyboard.press("Enter")
    assert symbols.locator("li", has_text="evenness").is_visible()
    assert page.evaluate("() => document.documentElement.scrollWidth - innerWidth") <= 0

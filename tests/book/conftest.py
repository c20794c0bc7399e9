"""The built book, a server for it and a browser, once for all tests."""

import functools
import http.server
import os
import shutil
import sys
import threading
from pathlib import Path
from urllib.parse import urlparse

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "_ext"), str(Path(__file__).parent)]

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Without a display, without calls home: a test must see only what the page itself asks for.
BROWSER_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

# Milliseconds that a page may take on a busy machine.
PATIENCE = 120_000
# After this nothing moves any more: formulas are set, and pictures have their size. Half a second
# without a request would take longer, and be no sign of it on a busy machine.
FORMULAS_READY = """async () => {
  if (window.MathJax && MathJax.startup) await MathJax.startup.promise;
  await document.fonts.ready;
  await Promise.all([...document.images].map((image) => image.decode().catch(() => null)));
}"""


@pytest.fixture(scope="session")
def html(pytestconfig):
    """The folder of the built pages; the same build as `make book`, reused when up to date."""
    from book_sources import BookError
    from build_book import build

    # It takes minutes the first time, so it is seen at work. A failure is told once and in full;
    # every test that needs the book then fails in one line.
    with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print()
        try:
            return build(ROOT)
        except BookError as error:
            print(error)
    pytest.fail("the book does not build; 'make book' says why", pytrace=False)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        """Say nothing: one line a request would bury the tests' own output."""


@pytest.fixture(scope="session")
def site(html):
    """The address at which the built book is served."""
    handler = functools.partial(_Quiet, directory=str(html))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


# For one module, because two running copies of playwright in one process refuse each other.
@pytest.fixture(scope="module")
def browser():
    """A real browser; without one the tests are skipped here and fail in continuous integration."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        reason = "no browser found: install chromium (on Debian: apt-get install chromium)"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=BROWSER_FLAGS)
        yield browser
        browser.close()


class _Pages:
    """Opens pages of the book and collects what goes wrong in them."""

    def __init__(self, browser, site):
        self._browser, self._site, self._contexts = browser, site, []

    def __call__(self, address, width=1300, **options):
        """Open a page at a width.

        Further options are those of a browser's context, such as `color_scheme="dark"`.
        """
        size = {"width": width, "height": 900}
        context = self._browser.new_context(viewport=size, **options)
        self._contexts.append(context)
        context.set_default_navigation_timeout(PATIENCE)
        page = context.new_page()
        page.troubles, page.scheme = [], options.get("color_scheme", "light")
        self._watch(page)
        page.goto(f"{self._site}/{address}", wait_until="load")
        page.evaluate(FORMULAS_READY)
        return page

    def _watch(self, page):
        host = urlparse(self._site).netloc

        def note(request):
            if urlparse(request.url).netloc not in (host, ""):
                page.troubles.append(f"request to another host: {request.url}")

        def check(response):
            if response.status >= 400:
                page.troubles.append(f"status {response.status}: {response.url}")

        page.on("request", note)
        page.on("response", check)
        page.on("requestfailed", lambda r: page.troubles.append(f"failed request: {r.url}"))
        page.on("pageerror", lambda error: page.troubles.append(f"script error: {error}"))
        page.on(
            "console",
            lambda m: m.type == "error" and page.troubles.append(f"console error: {m.text}"),
        )

    def close(self):
        for context in self._contexts:
            context.close()


@pytest.fixture
def open_page(browser, site):
    """A function that opens a page at a width, for one test."""
    pages = _Pages(browser, site)
    yield pages
    pages.close()


@pytest.fixture(scope="module")
def visited(request, browser, site):
    """The page of a document, opened once, wide and light, for all tests that ask it something."""
    pages = _Pages(browser, site)
    yield pages(f"{request.param}.html", color_scheme="light")
    pages.close()

"""Opens pages of this package in headless Chromium, for tests that look at them."""

import os
import shutil
import time

import pytest

CHROMIUM = os.environ.get("POPSIM_CHROMIUM") or shutil.which("chromium")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium among the programs, and none in POPSIM_CHROMIUM"
)
WIDE = (1280, 900)
_FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
_SECONDS = 20.0


def browse():
    """Yield a browser, and close it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_FLAGS)
        yield browser
        browser.close()


def opened_pages(browser, folder, suffix="", ready=None):
    """Yield a function that opens a file; at the end nothing was asked for, nothing went wrong.

    Args:
        browser: The browser.
        folder: The folder of the files.
        suffix: What the names of the files have behind those that the function gets.
        ready: What a page has when it is complete (a selector); None if it is at once.
    """
    opened = []

    def open_file(name, size=WIDE, **settings):
        page = browser.new_page(viewport={"width": size[0], "height": size[1]}, **settings)
        said, asked = [], []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        opened.append((page, said, asked))
        page.goto((folder / f"{name}{suffix}").as_uri())
        if ready is not None:
            page.wait_for_selector(ready, timeout=1000 * _SECONDS)
        return page

    yield open_file
    for page, said, asked in opened:
        page.close()
        assert said == []
        assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def wait_until(page, condition, arg=None):
    """Wait for a condition of JavaScript.

    Playwright's own ``wait_for_function`` evaluates text in the page, which the pages forbid.
    """
    end = time.monotonic() + _SECONDS
    while not page.evaluate(condition, arg):
        assert time.monotonic() < end, f"not true in {_SECONDS} s: {condition}"
        time.sleep(0.02)


def colours(page, selector):
    """Return how many colours the canvas has."""
    return page.locator(selector).evaluate(
        """canvas => {
          const pen = canvas.getContext("2d");
          const pixels = pen.getImageData(0, 0, canvas.width, canvas.height).data;
          return new Set(new Uint32Array(pixels.buffer)).size;
        }"""
    )

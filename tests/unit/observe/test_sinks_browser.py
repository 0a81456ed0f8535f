"""The HTML page in a browser: search, sorting, charts, keys, wide and narrow screens."""

import numpy as np
import pytest

from popsim_torch.observe.record import Record
from popsim_torch.observe.sinks import write_page
from popsim_torch.statistics import Statistics
from tests.pages import WIDE, browse, colours, needs_chromium, opened_pages, wait_until
from tests.unit.observe.made_records import record, training

pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = needs_chromium

NARROW = (390, 844)
HOSTILE = "</script><img src=x onerror=\"document.title='bad'\"><b>bold</b>"


@pytest.fixture(scope="module")
def browser():
    yield from browse()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return a page of one run, and one of two runs."""
    folder = tmp_path_factory.mktemp("pages")
    records = [*training(60, fault=40), record(HOSTILE, 0, [1.0, 2.0])]
    write_page(folder / "one.html", records, title="MNIST, half precision")
    write_page(
        folder / "two.html",
        training(60),
        title="Two runs",
        other=[*training(60)[: 30 * 15], *training(60, seed=1)[30 * 15 :]],
        labels=("seed 0", "seed 1"),
    )
    return folder


@pytest.fixture
def open_page(browser, files):
    """Open a page, and check afterwards that nothing was asked for and nothing went wrong."""
    yield from opened_pages(browser, files)


def names(page, table="#table"):
    return page.locator(f"{table} tbody td.name").all_inner_texts()


SIZES = pytest.mark.parametrize("size", [WIDE, NARROW])


@SIZES
def test_the_page_shows_the_run(open_page, size):
    page = open_page("one.html", size)
    assert page.title() == "MNIST, half precision"
    assert "16 tensors · 901 records · steps 0 to 59 · 4 alarms" in page.inner_text("#summary")
    assert page.locator("button.alarm").count() == 4 and len(names(page)) == 16
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= size[0]


@SIZES
def test_search(open_page, size):
    page = open_page("one.html", size)
    page.fill("#search", "gradient CLASS")
    assert names(page) == ["Gradient___classifier.4.weight", "Gradient___classifier.1.weight"]
    assert page.inner_text("#found") == "2 of 16"
    page.fill("#search", "nowhere")
    assert page.inner_text("#table tbody") == "No name has these words."
    page.press("#search", "Escape")
    assert len(names(page)) == 16


@SIZES
def test_sorting(open_page, size):
    page = open_page("one.html", size)
    program = names(page)
    head = page.locator("#table th", has_text="Tensor")
    head.locator("button").click()
    assert names(page) == sorted(program, key=str.lower)
    assert head.get_attribute("aria-sort") == "ascending"
    norm = page.locator("#table th", has_text="Norm").first
    norm.locator("button").click()
    values = [
        float(text) for text in page.locator("#table tbody tr td:nth-child(5)").all_inner_texts()
    ]
    assert values == sorted(values, reverse=True) and len(values) == 16
    assert page.locator("th[aria-sort]").count() == 1
    for _ in range(2):
        norm.locator("button").click()
    assert names(page) == program


@SIZES
def test_a_row_shows_charts(open_page, size):
    page = open_page("one.html", size)
    page.locator("#table tbody tr", has_text="UpdatedVar___classifier.4.weight").click()
    assert page.inner_text("#detail-title") == "UpdatedVar___classifier.4.weight"
    for chart in ("#norm-chart", "#mean-chart"):
        assert page.locator(f"{chart} canvas").count() == 1
        assert colours(page, f"{chart} canvas") > 10
        box = page.locator(f"{chart} canvas").bounding_box()
        assert box["width"] > 200 and box["x"] + box["width"] <= size[0]
    assert colours(page, "#heat") > 20
    assert page.locator("#counts-figure").is_hidden()
    page.locator("#heat").hover(position={"x": 150, "y": 130})
    assert "finite values" in page.inner_text("#heat-value")
    wait_until(page, "document.getElementById('detail').getBoundingClientRect().top < innerHeight")


def test_an_alarm_shows_its_tensor(open_page):
    page = open_page("one.html")
    page.locator("button.alarm", has_text="NaN").click()
    assert page.inner_text("#detail-title") == "Gradient___classifier.1.weight"
    assert page.locator("#counts-figure").is_visible()
    assert colours(page, "#counts-chart canvas") > 10
    assert "20 times until step 59" in page.locator("button.alarm", has_text="NaN").inner_text()


def test_keys_reach_everything(open_page):
    page = open_page("one.html")
    page.keyboard.press("/")
    page.keyboard.type("UpdatedVar")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert page.inner_text("#detail-title") == "UpdatedVar___features.3.weight"
    row = page.locator("#table tr[aria-current]")
    assert row.locator("td.name").inner_text() == "UpdatedVar___features.3.weight"


def test_hostile_names_are_text(open_page):
    page = open_page("one.html")
    assert HOSTILE in names(page) and page.locator("img, b").count() == 0
    assert page.title() == "MNIST, half precision"


@SIZES
def test_two_runs(open_page, size):
    page = open_page("two.html", size)
    assert "They first differ at step 30, in features.0/Relu:0." in page.inner_text("#difference")
    rows = page.locator("#difference-table tbody tr")
    assert rows.count() == 15
    rows.nth(6).click()
    assert page.inner_text("#difference-name") == names(page, "#difference-table")[6]
    for chart in ("#overlay-chart", "#relative-chart"):
        assert colours(page, f"{chart} canvas") > 10
    assert "seed 1" in page.inner_text("#overlay-chart")
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]


def test_light_and_dark(open_page):
    grounds = []
    for scheme in ("light", "dark"):
        page = open_page("one.html", color_scheme=scheme)
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        before = page.evaluate("document.getElementById('heat').toDataURL()")
        page.emulate_media(color_scheme="dark" if scheme == "light" else "light")
        wait_until(page, "old => document.getElementById('heat').toDataURL() !== old", arg=before)
    assert grounds == ["rgb(246, 247, 249)", "rgb(17, 22, 28)"]


def test_charts_follow_the_size_of_the_window(open_page):
    page = open_page("one.html")
    page.set_viewport_size({"width": 700, "height": 800})
    wait_until(page, "document.querySelector('#norm-chart canvas').clientWidth < 690")
    wait_until(page, "document.documentElement.scrollWidth <= 700")


def test_odd_records(open_page, files):
    odd = [
        Record("bare", 0, None, 0, Statistics(0, 0, 0)),
        record("nan", 0, [np.nan, np.inf]),
        record("zeros", 0, [0.0]),
        record("huge", 0, [3e38, -3e38, 1e-45], replica=2),
        *(record("micro", step, [step], micro_batch=one) for step in range(3) for one in range(2)),
    ]
    write_page(files / "odd.html", odd, other=odd[:3])
    write_page(files / "empty.html", [], other=[])
    page = open_page("odd.html")
    for row in page.locator("#table tbody tr").all():
        row.click()
        assert page.locator("#detail-title").inner_text() == row.locator("td").first.inner_text()
    for row in page.locator("#difference-table tbody tr").all():
        row.click()
    empty = open_page("empty.html")
    assert "There are no records." in empty.inner_text("#alarm-list")


def test_thousands_of_tensors_are_shown_in_parts(open_page, files):
    write_page(files / "many.html", [record(f"x{place}", 0, [1.0]) for place in range(700)])
    page = open_page("many.html")
    assert len(names(page)) == 300
    page.click("#more")
    page.click("#more")
    assert len(names(page)) == 700 and page.locator("#more").is_hidden()

"""The page "How true is it?" says what the code says."""

import re
from collections import Counter
from pathlib import Path

import pytest

from popsim_torch.errors import UsageValueError
from popsim_torch.machine import machine_constants
from popsim_torch.validation.page import (
    constants_table,
    fill,
    models_table,
    validation_table,
    write_page,
)
from popsim_torch.validation.rows import Row, validation_rows, whole_models
from popsim_torch.validation.table import results_of, text_of

PAGE = Path(__file__).parents[2] / "docs" / "how_true.md"


@pytest.fixture(scope="module")
def page():
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def fast_table():
    return validation_table(results_of(validation_rows(fast=True))).splitlines()


def between(text, name):
    return text.partition(f"<!-- the {name} -->")[2].partition(f"<!-- end of the {name} -->")[0]


def test_the_page_has_the_constants_of_the_code(page):
    assert between(page, "constants").strip() == constants_table()


def test_the_page_has_the_fast_rows_of_the_code(page, fast_table):
    assert between(page, "table").strip().splitlines()[: len(fast_table)] == fast_table


def test_the_page_has_all_rows_of_the_table(page):
    lines = between(page, "table").strip().splitlines()[2:]
    rows = [(row.number, row.what, row.unit) for row in validation_rows()]
    assert [tuple(line.strip("| ").split(" | ")[:3]) for line in lines] == rows


@pytest.mark.slow
def test_the_page_has_the_figures_of_whole_models(page):
    assert between(page, "table").strip() == validation_table(results_of(validation_rows()))
    assert between(page, "models").strip() == models_table(whole_models())


def test_the_page_counts_the_rows_as_they_are(page):
    firm = Counter(row.number for row in validation_rows() if not row.soft)
    numbers = {
        "22 rows are arithmetic": ("V1", "V2", "V3", "V10"),
        "33 rows are single products": ("V4", "V5", "V6", "V7"),
        "Eight rows helped to choose a constant": ("V11", "V15", "V16", "V19"),
        "Nine rows are left": ("V12", "V13", "V17", "V18", "V20", "V21"),
    }
    words = {"Eight": 8, "Nine": 9}
    for sentence, group in numbers.items():
        assert f"**{sentence}" in page
        count = sentence.split()[0]
        expected = words[count] if count in words else int(count)
        assert sum(firm[number] for number in group) == expected
    assert sum(firm.values()) == sum(firm[number] for group in numbers.values() for number in group)


def test_each_folder_and_file_that_the_page_names_exists(page):
    named = re.findall(r"`(csrc/[\w/.]+)`", page)
    assert len(named) > 5
    assert [name for name in named if not (PAGE.parents[1] / name).exists()] == []


def test_every_constant_has_a_row_with_grade_and_source():
    lines = constants_table().splitlines()[2:]
    assert len(lines) == len(machine_constants())
    for line, one in zip(lines, machine_constants(), strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[0] == one.name
        assert cells[3] in ("A", "B", "C")
        assert (" to " in cells[4]) == (one.least < one.most)
        assert cells[5] == one.source != ""


def test_a_row_outside_of_its_limit_says_so():
    row = Row("V0", "a product", "cycles", 100, lambda: 150.0, 0.1, "nobody")
    results = results_of([row])
    assert "| +50.0% (outside) | 10% |" in validation_table(results)
    assert "OUTSIDE" in text_of(results)


def test_tables_go_between_their_marks(tmp_path):
    row = Row("V0", "a product", "cycles", 100, lambda: 101.0, 0.1, "nobody")
    page = tmp_path / "page.md"
    parts = [
        f"<!-- the {name} -->old<!-- end of the {name} -->"
        for name in ("constants", "table", "models")
    ]
    page.write_text(f"before\n{parts[0]}\nmiddle\n{parts[1]}\n{parts[2]}\nafter\n")
    for _ in range(2):  # the second time changes nothing
        write_page(str(page), results_of([row]), {})
        text = page.read_text()
        assert text.startswith("before\n") and text.endswith("\nafter\n") and "\nmiddle\n" in text
        assert between(text, "table").strip() == validation_table(results_of([row]))
        assert "old" not in text


def test_a_page_without_marks_stays_as_it_is(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing here\n")
    with pytest.raises(UsageValueError, match="must have the marks <!-- the table -->"):
        write_page(str(page), [], {})
    assert page.read_text() == "nothing here\n"


@pytest.mark.parametrize(
    "text",
    [
        "<!-- end of the table --><!-- the table -->",
        "<!-- the table --><!-- the table --><!-- end of the table -->",
        "<!-- the table -->",
    ],
)
def test_marks_stand_once_and_in_order(text):
    with pytest.raises(UsageValueError, match="once each, in this order"):
        fill(text, "table", "content")

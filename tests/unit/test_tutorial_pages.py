"""Every tutorial is a page of the site, with its pictures and with valid links."""

import re

import pytest

from tests.unit.docs_extensions import DOCS, TUTORIALS

NAMES = sorted(readme.parent.name for readme in (DOCS.parent / "tutorials").glob("*/README.md"))


def test_every_tutorial_is_listed_once():
    listed = re.findall(r"^tutorials/(\w+)$", (DOCS / "index.md").read_text(), re.MULTILINE)
    assert sorted(listed) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_pages_pictures_and_scripts(name):
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", TUTORIALS.page(name))
    assert [link for link in links if not (DOCS / "tutorials" / link).resolve().is_file()] == []
    assert [link for link in links if link.endswith("README.md")] == []


def test_the_pictures_are_there():
    assert "](../../tutorials/observing_tensors/static/" in TUTORIALS.page("observing_tensors")

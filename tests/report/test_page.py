"""The data of the page, and the page as a file."""

import base64
import json
import re
import struct

import pytest

from popsim_torch.report.folder import to_text
from popsim_torch.report.page import comparison_page, report_page
from popsim_torch.report.page_data import report_data
from popsim_torch.report.report import Report
from tests.report.data import make_report

HOSTILE = "</script><img src=x onerror=\"document.title='bad'\"><b>bold</b>"


def embedded(page):
    (text,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL
    )
    return json.loads(text)


def numbers(text, kind="d"):
    raw = base64.b64decode(text)
    return list(struct.unpack(f"<{len(raw) // struct.calcsize(kind)}{kind}", raw))


def test_arrays_hold_the_figures():
    report = Report(make_report(lanes=6))
    data = report_data(report)
    ops = data["estimate"]["ops"]
    assert numbers(ops["cycles"]) == [op.cycles for op in report.ops]
    names = [data["texts"][place] for place in numbers(ops["name"], "i")]
    assert names == [op.name for op in report.ops]
    counts, flat = numbers(ops["inputs_count"], "i"), numbers(ops["inputs"], "i")
    assert counts == [len(op.inputs) for op in report.ops] and sum(counts) == len(flat)
    tiles = data["estimate"]["ipus"][1]["memory"]["tiles"]
    assert numbers(tiles) == list(report.memory[1].tiles)
    first = numbers(data["estimate"]["variables"]["first_op"], "i")
    assert first.count(-1) == sum(one["first_op"] is None for one in report.estimate["variables"])
    assert data["runs"][0]["count"] == 6


def test_the_page_is_one_file():
    page = report_page(Report(make_report()))
    assert "Content-Security-Policy\" content=\"default-src 'none'" in page
    assert re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', page) == []
    assert "{{" not in page.replace("${{", "")
    assert embedded(page)["reports"][0]["name"] == "training"


def test_hostile_names_end_nothing():
    data = make_report(name=HOSTILE)
    data["estimate"]["ops"][0]["name"] = HOSTILE
    page = report_page(Report(data))
    assert page.count("</script>") == 3 and HOSTILE not in page
    assert HOSTILE in embedded(page)["reports"][0]["texts"]


def test_a_comparison_has_both():
    comparison = Report(make_report()).compare(Report(make_report(iterations=1)))
    data = embedded(comparison_page(comparison))
    assert len(data["reports"]) == 2
    rows = {row[0]: row for row in data["comparison"]["simulated"]}
    assert rows["cycles of a call"][3] == next(
        one.change for one in comparison.figures() if one.name == "cycles of a call"
    )
    assert data["comparison"]["others"][0][0] == "device iterations in a call"


@pytest.mark.parametrize("training", [True, False])
def test_a_report_of_5000_ops_is_small_enough(training):
    data = make_report(layers=1000, stages=4, tiles=1472, training=training)
    report = Report(data)
    assert len(report.ops) == 5001 if training else 2001
    assert len(report_page(report)) < 2.5e6 and len(to_text(data)) < 6e6

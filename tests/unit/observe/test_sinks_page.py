"""The HTML page: its data, and when it is written."""

import json
import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.observe.record import Record
from popsim_torch.observe.sinks import HtmlPage, collected, write_page
from popsim_torch.statistics import Statistics
from tests.unit.observe.made_records import record, training

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>{{script}}&amp;\u2028"


def data(path):
    text = path.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1], parse_constant=pytest.fail)


def tensor(page, name):
    return next(one for one in page["tensors"] if one["name"] == name)


def test_the_page_has_the_statistics_of_every_step(tmp_path):
    path = tmp_path / "run.html"
    records = [record("x", step, [3.0, -4.0, 0.0]) for step in (0, 5)]
    write_page(path, [*records, Record("y", 7, None, 0, Statistics(4, 0, 0))], title="My run")
    page = data(path)
    assert page["summary"] == {"records": 3, "first": 0, "last": 7, "dropped": 0}
    one = tensor(page, "x")
    assert one["x"] == [0, 5] and one["norm"] == [5, 5] and one["minimum"] == [-4, -4]
    assert one["last"]["zeros"] == pytest.approx(1 / 3, abs=1e-6) and one["zeros"] == [1, 1]
    assert one["histogram"]["edges"] == [-8, -4, -2, 2, 4, 8]
    assert one["histogram"]["counts"] == [[1, 0, 1, 1, 0]] * 2
    other = tensor(page, "y")
    assert "norm" not in other and other["histogram"] is None and other["last"]["norm"] is None
    assert "<h1>My run</h1>" in path.read_text() and page["difference"] is None
    assert [one.name for one in tmp_path.iterdir()] == ["run.html"]


def test_what_is_not_finite_is_text(tmp_path):
    path = tmp_path / "run.html"
    statistics = Statistics(2, 1, 1, mean=math.nan, norm=math.inf, minimum=-math.inf)
    write_page(path, [Record("x", 0, None, 0, statistics)])
    one = tensor(data(path), "x")
    assert (one["mean"], one["norm"], one["minimum"]) == (["nan"], ["inf"], ["-inf"])
    assert one["last"]["mean"] == "nan" and one["last"]["nans"] == 1


def test_alarms_and_the_worst_of_all_steps(tmp_path):
    path = tmp_path / "run.html"
    write_page(path, training(20, fault=10))
    page = data(path)
    found = {(one["name"], one["kind"]): one for one in page["alarms"]}
    assert set(found) == {
        ("Gradient___features.3.weight", "inf"),
        ("Gradient___features.3.weight", "norm"),
        ("features.6/Relu:0", "zeros"),
        ("Gradient___classifier.1.weight", "nan"),
    }
    nan = found["Gradient___classifier.1.weight", "nan"]
    assert (nan["first"], nan["last"], nan["times"]) == (10, 19, 10)
    assert tensor(page, "Gradient___features.3.weight")["worst"] == {"nans": 0, "infs": 1}
    assert tensor(page, "Gradient___features.3.weight")["last"]["infs"] == 0


class Parts(HTMLParser):
    """The elements of a page."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.heading, self._inside = [], "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._inside = tag

    def handle_data(self, data):
        if self._inside == "h1":
            self.heading += data

    def handle_endtag(self, tag):
        self._inside = ""


def test_hostile_names_stay_text(tmp_path):
    path, plain = tmp_path / "run.html", tmp_path / "plain.html"
    write_page(path, [record(HOSTILE, 0, [np.nan])], title=HOSTILE, other=[record(HOSTILE, 0, [1])])
    write_page(plain, [record("x", 0, [np.nan])], other=[record("x", 0, [1])])
    page = data(path)
    assert page["tensors"][0]["name"] == page["alarms"][0]["name"] == HOSTILE
    parts = Parts(path.read_text(encoding="utf-8"))
    assert parts.heading == HOSTILE
    assert parts.tags == Parts(plain.read_text(encoding="utf-8")).tags


def test_the_page_needs_nothing_else(tmp_path):
    path = tmp_path / "run.html"
    write_page(path, training(2))
    text = path.read_text(encoding="utf-8")
    assert "{{" not in text.split("</style>")[-1].split("<script")[0]
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", text.split("<script")[0])
    assert "default-src 'none'" in text and text.count("uPlot") > 3


def test_long_runs_keep_their_newest_numbers_and_are_thinned(tmp_path):
    path = tmp_path / "run.html"
    bare = [Statistics(1, 0, 0, norm=1000.0 + step) for step in range(9000)]
    write_page(path, [Record("x", step, None, 0, one) for step, one in enumerate(bare)])
    one = tensor(data(path), "x")
    assert one["every"] == 16 and one["x"] == list(range(0, 9000, 16))
    assert one["norm"] == [1000 + step for step in one["x"]]
    assert one["last"]["norm"] == 9999 and one["last"]["seen"] == 9000


def test_what_stands_out_is_not_left_out(tmp_path):
    path = tmp_path / "run.html"
    bare = [Statistics(1, int(step == 1001), int(step == 7777), norm=1.0) for step in range(9000)]
    bare[333] = Statistics(1, 0, 0, norm=50.0)
    write_page(path, [Record("x", step, None, 0, one) for step, one in enumerate(bare)])
    one = tensor(data(path), "x")
    assert len(one["x"]) < 1001 and one["x"] == sorted(one["x"])
    assert one["norm"][one["x"].index(333)] == 50
    assert one["nans"][one["x"].index(1001)] == one["infs"][one["x"].index(7777)] == 1


def test_a_page_of_many_tensors_shows_fewer_steps_of_each(tmp_path, monkeypatch):
    for name, number in (("POINTS", 10), ("HISTOGRAMS", 3)):
        monkeypatch.setattr(collected, f"_LEAST_{name}", number)
        monkeypatch.setattr(collected, f"_{name}_OF_PAGE", 100)
    path = tmp_path / "run.html"
    names = [f"x{place}" for place in range(50)]
    write_page(path, [record(name, step, [1.0]) for step in range(21) for name in names])
    one = tensor(data(path), "x49")
    assert one["every"] == 4 and one["x"] == [0, 4, 8, 12, 16, 20]
    assert one["histogram"]["x"] == [0, 7, 14] and one["last"]["seen"] == 21


def test_micro_batches_are_between_steps(tmp_path):
    path = tmp_path / "run.html"
    write_page(
        path, [record("x", step, [1.0], micro_batch=one) for step in (0, 1) for one in (0, 1)]
    )
    one = tensor(data(path), "x")
    assert one["x"] == one["histogram"]["x"] == [0, 0.5, 1, 1.5]


def compared(tmp_path, here, there):
    path = tmp_path / "run.html"
    write_page(path, here, other=there, labels=("a", "b"))
    page = data(path)
    assert page["labels"] == ["a", "b"]
    return page["difference"]


def test_two_runs_that_differ(tmp_path):
    here = [record(name, step, [3.0, 4.0]) for step in range(4) for name in ("x", "y")]
    there = [record("x", step, [3.0, 4.0] if step < 2 else [3.0, 4.5]) for step in range(4)]
    found = compared(tmp_path, here, [*there, record("z", 0, [1.0])])
    (one,) = found["tensors"]
    assert (one["name"], one["first"], one["x"]) == ("x", 2, [0, 1, 2, 3])
    assert one["here"] == [5] * 4 and one["there"][3] == pytest.approx(math.hypot(3, 4.5), abs=1e-4)
    assert one["relative"][:2] == [0, 0] and one["largest"] == one["relative"][3] > 0.05
    assert found["text"] == (
        "They first differ at step 2, in x. 1 of 1 common tensors differ. "
        "1 tensor is only in the first run. 1 tensor is only in the second run."
    )


def test_fingerprints_decide(tmp_path):
    here = [record("x", 0, [1.0], fingerprint=1), record("y", 0, [1.0], fingerprint=1)]
    there = [record("x", 0, [1.0], fingerprint=2), record("y", 0, [1.0])]
    found = compared(tmp_path, here, there)
    assert [one["first"] for one in found["tensors"]] == [0, None]


def test_equal_runs_with_nan_and_runs_with_nothing_in_common(tmp_path):
    run = [record("x", 0, [np.nan])]
    assert "All 1 common tensors are equal" in compared(tmp_path, run, run)["text"]
    assert compared(tmp_path, run, [])["text"].startswith("The two runs have no tensor in common.")
    later = [record("x", 9, [1.0])]
    assert compared(tmp_path, run, later)["text"] == "The two runs have no step in common."


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("popsim_torch.observe.sinks.html_page.time.monotonic", lambda: now[0])
    return now


def test_a_page_is_written_while_the_model_runs_and_at_the_end(tmp_path, clock):
    path = tmp_path / "run.html"
    sink = HtmlPage(str(path), seconds=10)
    assert data(path)["summary"]["records"] == 0
    seen = []
    for step in range(4):
        clock[0] = step * 4.0
        sink.write_records([record("x", step, [1.0])])
        seen.append(data(path)["summary"]["records"])
    assert seen == [0, 0, 0, 4]
    sink.write_records([record("x", 4, [1.0])])
    sink.records_dropped(3)
    sink.close()
    assert data(path)["summary"] == {"records": 5, "first": 0, "last": 4, "dropped": 3}


def test_an_interrupted_write_leaves_the_old_page(tmp_path, clock, monkeypatch):
    path = tmp_path / "run.html"
    sink = HtmlPage(path, seconds=0)
    old = path.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        sink.write_records([record("x", 0, [1.0])])
    assert path.read_bytes() == old and [one.name for one in tmp_path.iterdir()] == ["run.html"]


def test_mistakes(tmp_path):
    with pytest.raises(UsageTypeError, match="HtmlPage: 7 is not a path"):
        HtmlPage(7)
    with pytest.raises(UsageTypeError, match="write_page: None is not a path"):
        write_page(None, [])
    with pytest.raises(UsageValueError, match="seconds is 0 or more, got nan"):
        HtmlPage(tmp_path / "run.html", seconds=math.nan)
    with pytest.raises(FileNotFoundError):
        HtmlPage(tmp_path / "nowhere" / "run.html")

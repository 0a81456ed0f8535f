"""Opening reports: those of this version, and files that are something else."""

import copy
import json
import random
import re
from pathlib import Path

import pytest

import popsim_torch as poptorch
from popsim_torch.report.folder import to_text
from popsim_torch.report.schema import REPORT, check_fields, field_names
from tests.report.data import make_report

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "profile.pop").write_text(to_text(make_report(lanes=4)))
    return tmp_path / "training"


def refused(folder, content, name="profile.pop"):
    """Return the message about a file with some content."""
    file = folder / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(poptorch.Error) as error:
        poptorch.report.open(file)
    return error.value.message


def test_a_report_opens_by_its_folder_its_file_and_the_folder_around(folder):
    for path in (folder, folder / "profile.pop", folder.parent, str(folder)):
        report = poptorch.report.open(path)
        assert report.folder == folder and report.data == make_report(lanes=4)
    assert repr(report) == "Report('training', 21 ops, 2 of 7 calls recorded)"


def test_the_file_has_a_line_for_each_field(folder):
    lines = (folder / "profile.pop").read_text().splitlines()
    assert (
        ' "calls": 7' in (line.rstrip(",") for line in lines)
        and '  "device_iterations": 3,' in lines
    )
    assert sum(line.startswith('   {"name":"net.') for line in lines) >= 8


def test_nothing_is_there(tmp_path):
    with pytest.raises(poptorch.Error, match=r"there is nothing at .*enableProfiling"):
        poptorch.report.open(tmp_path / "nowhere")
    with pytest.raises(poptorch.Error, match="there is no report in"):
        poptorch.report.open(tmp_path)
    with pytest.raises(TypeError, match="3 is not a path"):
        poptorch.report.open(3)


def test_of_several_reports_one_is_named(folder):
    other = folder.parent / "inference"
    other.mkdir()
    (other / "profile.pop").write_text("{}")
    with pytest.raises(poptorch.Error, match=r"has 2 reports.*'.*inference', '.*training'"):
        poptorch.report.open(folder.parent)


def test_other_files_are_called_what_they_are(folder):
    assert "earlier version" in refused(folder, {"format": "popsim_torch report 1", "ops": []})
    assert "PopVision Graph Analyser" in refused(folder, b"SQLite format 3\0" + bytes(100))
    assert "not a report of popsim_torch" in refused(folder, {"a": 1})
    assert "not a report of popsim_torch" in refused(folder, [1, 2])
    assert "'popsim_torch report 3'" in refused(folder, {"format": "popsim_torch report 3"})
    assert "it is not JSON" in refused(folder, b"\xff\xfe\x00")
    assert "it is not JSON" in refused(folder, "")
    assert "it is not JSON" in refused(folder, "[" * 100_000)
    assert "is no number of JSON" in refused(folder, '{"format": NaN}')


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9, 0.999])
def test_a_truncated_report_is_called_so(folder, share):
    text = to_text(make_report())
    message = refused(folder, text[: max(int(share * len(text)), 60)])
    assert "its end is missing" in message and "it cannot" not in message


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("pid",), "4711", "pid is '4711', where a count is needed"),
        (("calls",), True, "calls is True, where a count is needed"),
        (("static", "host_ops"), {}, "static.host_ops is an object, where a list is needed"),
        (("estimate", "ops", 3, "cycles"), "1", r"estimate.ops\[3\].cycles is '1', where a number"),
        (
            ("estimate", "ops", 0, "inputs"),
            [99_999],
            r"ops\[0\].inputs has 99999, of \d+ variables",
        ),
        (("estimate", "ops", 0, "outputs"), [-1], r"ops\[0\].outputs has -1"),
        (("estimate", "variables", 2, "first_op"), 4000, r"variables\[2\].first_op is 4000"),
        (
            ("estimate", "ipus", 0, "liveness", 0),
            [0, 1],
            r"ipus\[0\].liveness has the row \[0, 1\]",
        ),
        (("estimate", "ipus", 0, "memory", "peak_op"), -4, "memory.peak_op is -4"),
        (("estimate", "device"), None, "estimate.device is None, where an object is needed"),
        (("runs", 0, "measured"), 1, r"runs\[0\].measured is 1, where an object is needed"),
    ],
)
def test_a_damaged_report_is_told_by_field(folder, path, value, problem):
    data = make_report()
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    message = refused(folder, data)
    assert "it is damaged: " in message and re.search(problem, message)


def test_a_missing_field_is_told(folder):
    data = make_report()
    del data["estimate"]["call"]["seconds"]
    assert "estimate.call.seconds is missing" in refused(folder, data)


def test_fields_of_later_versions_are_no_mistake(folder):
    data = make_report()
    data["estimate"]["ops"][0]["power"] = 1.5
    (folder / "profile.pop").write_text(json.dumps(data))
    assert poptorch.report.open(folder).ops[0].name == "net.block0.fc0/Gemm:0"


def _places(value, path=()):
    yield path
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _places(one, (*path, key))
    elif isinstance(value, list):
        for place, one in enumerate(value[:2]):
            yield from _places(one, (*path, place))


def test_hostile_values_are_refused_or_harmless(folder):
    """Whatever stands in the place of a value: the file is refused, or everything works."""
    draw = random.Random(1)
    whole = make_report(layers=2)
    odd = [None, [], {}, "<script>", -1, 10**30, 1.5, True, [[[]]], "\0", {"a": {}}, 1e300]
    opened = 0
    for path in draw.sample([path for path in _places(whole) if path], 250):
        data = copy.deepcopy(whole)
        place = data
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = draw.choice(odd)
        (folder / "profile.pop").write_text(json.dumps(data))
        try:
            report = poptorch.report.open(folder)
        except poptorch.Error:
            continue
        opened += 1
        assert str(report) and report.by_module() and len(str(report.compare(report))) > 100
    assert opened > 10


def test_the_schema_checks_what_the_generator_makes():
    for settings in ({}, {"training": False}, {"stages": 1}, {"accumulation": 40}, {"runs": 0}):
        assert check_fields(make_report(**settings)) is None


def test_a_report_without_an_estimate_opens(folder):
    data = {**make_report(), "estimate": None, "no_estimate": "it was a test", "validation": None}
    data["runs"] = [{**run, "simulated": None} for run in data["runs"]]
    (folder / "profile.pop").write_text(json.dumps(data))
    report = poptorch.report.open(folder)
    assert report.estimate is None and report.ops == () and report.memory == ()
    assert report.runs[1].measured_seconds == 0.5 and report.runs[1].simulated_cycles is None
    assert "none: it was a test" in str(report)


def test_the_documents_list_every_field():
    text = (DOCS / "report.md").read_text()
    rows = re.findall(r"^\| (`[^|]*`) \|", text[text.index("| field | content |") :], re.MULTILINE)
    listed = set()
    for row in rows:
        first, *others = (name.strip("`") for name in row.split(", "))
        before = first.rpartition(".")[0]
        listed |= {first} | {f"{before}.{name}" if before else name for name in others}
    fields = {re.sub(r"(\[\]|\.\*)$", "", name) for name in field_names(REPORT)}
    listed = {re.sub(r"(\[\]|\.\*)+$", "", name) for name in listed}
    assert {re.sub(r"(\[\])+$", "", name) for name in fields} - listed == set()
    assert {name for name in listed if not any(f.startswith(name) for f in fields)} == set()

"""The tutorial of bad numbers: each fault is found, repeated elsewhere, and mended."""

import re

import pytest

from tests.tutorials.running import TUTORIALS, draw_few_digits, run_alone, run_here

SCRIPT = TUTORIALS / "find_the_nan" / "find_the_nan.py"
VERDICTS = {
    "log-of-zero": ("log of zero: log(0)", "loss", "forward"),
    "half-overflow": ("overflow of float16: ", "prepare", "forward"),
    "bad-data": ("NaN came in through the input 'input' at element", "fc1", None),
    "exploding": ("overflow of float32", "loss", "forward"),
    "division": ("undefined: 0 / 0", "prepare", "forward"),
    "sqrt-gradient": ("division by zero: ", "loss", "backward"),
}

pytestmark = pytest.mark.tutorial


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return str(draw_few_digits(tmp_path_factory.mktemp("digits"), 800))


@pytest.mark.slow
def test_each_fault_is_found_and_mended(digits, capsys):
    run_here(SCRIPT, "--data-root", digits, "--batch-size", "40", "--steps", "20")
    printed = capsys.readouterr().out
    parts = dict(zip(VERDICTS, printed.split("\n\n"), strict=False))
    assert list(parts) == list(VERDICTS)
    for fault, part in parts.items():
        rule, layer, phase = VERDICTS[fault]
        assert part.startswith(f"{fault}\n")
        assert re.search(r"without the watch: the loss is (nan|inf) from step \d+ on", part), part
        assert f"rule:       {rule}" in part
        assert f"layer:      {layer}\n" in part
        assert phase is None or f"in the {phase} phase" in part
        assert "replayed:          the same verdict" in part
        first, last = re.search(r"mended: +the loss goes from ([\d.]+) to ([\d.]+)", part).groups()
        assert float(last) < float(first)


def test_the_map_and_the_capsule_are_kept(digits, tmp_path):
    flags = ("--data-root", digits, "--batch-size", "40", "--steps", "20", "--fault", "division")
    result = run_alone(SCRIPT, tmp_path, *flags, "--output", "map.png", "--capsule", "a.capsule")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.capsule").stat().st_size > 100_000


def test_files_of_several_faults_are_refused(digits, tmp_path):
    result = run_alone(SCRIPT, tmp_path, "--data-root", digits, "--output", "map.png")
    assert result.returncode == 2 and "pass --fault, too" in result.stderr

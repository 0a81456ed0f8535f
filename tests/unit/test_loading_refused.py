"""``poptorch.load`` refuses everything that is not a complete file of a compiled model."""

import os

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.errors import InternalError
from popsim_torch.executor import saving
from popsim_torch.files import container
from tests.options import make_options


def batch(size=16):
    return torch.randn(size, 4), torch.randint(0, 3, (size,))


@pytest.fixture
def whole(tmp_path):
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.LogSoftmax(1))
    model = poptorch.trainingModel(
        WithLoss(net), make_options(), poptorch.optim.Adam(net.parameters())
    )
    model(*batch())
    model.save(tmp_path / "file")
    return tmp_path / "file"


class WithLoss(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x, y):
        out = self.body(x)
        return out, nn.functional.nll_loss(out, y)


def test_a_file_that_was_cut_off_is_refused(whole):
    data = whole.read_bytes()
    for part in range(50):
        whole.write_bytes(data[: len(data) * part // 50])
        with pytest.raises(poptorch.Error, match=r"file: "):
            poptorch.load(whole)


def test_a_bit_that_flips_in_any_section_is_noticed(whole):
    data = whole.read_bytes()
    sections = container.read_sections(whole, "a compiled model")
    start = len(data) - sum(map(len, sections.values()))
    for name, section in sections.items():
        for position in {0, len(section) // 2, len(section) - 1}:
            spoilt = bytearray(data)
            spoilt[start + position] ^= 1
            whole.write_bytes(spoilt)
            with pytest.raises(poptorch.Error, match=f"the section '{name}'"):
                poptorch.load(whole)
        start += len(section)
    assert start == len(data)


def test_sections_that_are_wrong_behind_a_right_checksum_are_refused(whole):
    """A file that an attacker might write: never a crash, never another exception."""
    sections = container.read_sections(whole, "a compiled model")
    for name, section in sections.items():
        for spoilt in (b"", b"null", b'{"tuple": [1]}', section[:-1]):
            if (name, spoilt) == ("rng_state", b"null"):
                continue  # save_rng_state=False leaves this out
            container.write_sections(whole, "a compiled model", {**sections, name: spoilt})
            with pytest.raises(poptorch.Error):
                poptorch.load(whole)
        container.write_sections(
            whole, "a compiled model", {n: s for n, s in sections.items() if n != name}
        )
        with pytest.raises(poptorch.Error):
            poptorch.load(whole)


def test_a_program_that_only_the_library_knows_to_be_wrong_is_refused(whole):
    sections = container.read_sections(whole, "a compiled model")
    text = sections["program"]
    spoilt = text.replace(b'["axis",1]', b'["axis",7]')
    assert spoilt != text
    container.write_sections(whole, "a compiled model", {**sections, "program": spoilt})
    with pytest.raises(poptorch.Error, match=r"breaks a rule.* has an axis 7"):
        poptorch.load(whole)


def test_a_program_that_cannot_be_prepared_is_refused(whole, monkeypatch):
    def fail(*_args, **_more):
        raise InternalError("no kernel takes this")

    monkeypatch.setattr(saving, "fit_to_host", fail)
    with pytest.raises(poptorch.Error, match=r"cannot run here \(.*no kernel takes this"):
        poptorch.load(whole)


def test_another_version_is_refused(whole, monkeypatch):
    monkeypatch.setattr(container, "__version__", "0.0.9")
    with pytest.raises(AssertionError, match="written by version"):
        poptorch.load(whole)


def test_a_file_without_the_model_is_refused(tmp_path):
    model = poptorch.inferenceModel(nn.Linear(4, 3), make_options())
    model.compileAndExport(tmp_path / "file", torch.ones(2, 4), export_model=False)
    with pytest.raises(AssertionError, match="export_model=False"):
        poptorch.load(tmp_path / "file")


def test_other_files_are_refused(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("import os\n")
    torch.save(nn.Linear(1, 1), tmp_path / "pickle")
    for name in ("", "empty", "text", "pickle", "missing"):
        with pytest.raises(poptorch.Error, match=os.path.join(tmp_path.name, name).rstrip("/")):
            poptorch.load(tmp_path / name)


@pytest.mark.parametrize("name", [0, 7, None, True, b"file", ["file"]], ids=repr)
def test_what_is_no_path_is_refused(name):
    with pytest.raises(poptorch.Error, match=rf"Got a {type(name).__name__}, .*pass the path"):
        poptorch.load(name)
    with pytest.raises(poptorch.Error, match="pass the path"):
        poptorch.inferenceModel(nn.Linear(4, 3), make_options()).loadExecutable(name)
    os.fstat(0)  # still open


def test_names_that_no_system_has_are_refused(whole):
    fresh = poptorch.inferenceModel(nn.Linear(4, 3), make_options())
    for call in (poptorch.load, poptorch.load(whole).save, fresh.loadExecutable):
        for name in ("a\0b", "a\0b/c"):
            with pytest.raises(poptorch.Error, match="null"):
                call(name)


@pytest.mark.timeout(60)
def test_a_pipe_is_refused_at_once(whole):
    pipe = whole.with_name("pipe")
    os.mkfifo(pipe)
    with pytest.raises(poptorch.Error, match="not a regular file"):
        poptorch.load(pipe)
    with pytest.raises(poptorch.Error, match="not a regular file"):
        poptorch.load(whole).save(pipe)
    assert pipe.is_fifo()


def test_memory_that_is_not_there_is_named(whole, monkeypatch):
    def fail(*_):
        raise MemoryError

    monkeypatch.setattr("popsim_torch.files.executable.unpack_options", fail)
    with pytest.raises(poptorch.Error, match=r"file: MemoryError\(\)\. Export"):
        poptorch.load(whole)

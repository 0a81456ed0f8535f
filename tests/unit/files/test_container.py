"""Files are written completely or not at all, and no changed file is accepted."""

import builtins
import hashlib
import json
import os
import signal
from pathlib import Path

import pytest

import popsim_torch as poptorch
from popsim_torch.errors import UsageAssertionError
from popsim_torch.files import container, whole_file
from popsim_torch.files.container import read_sections, write_sections

CONTENT = "numbers"
SECTIONS = {"first": b"1234567890" * 30, "empty": b"", "last": bytes(range(256))}


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "some.file"
    write_sections(file, CONTENT, SECTIONS)
    return file


def test_what_was_written_is_read(path):
    assert read_sections(path, CONTENT) == SECTIONS
    assert os.listdir(path.parent) == [path.name]


def test_a_file_can_be_read_by_others(path):
    usual = path.parent / "usual"
    usual.write_bytes(b"")
    assert path.stat().st_mode == usual.stat().st_mode


def test_writing_once_more_takes_the_place_of_the_old_file(path):
    write_sections(path, CONTENT, {"new": b"data"})
    assert read_sections(path, CONTENT) == {"new": b"data"}
    assert os.listdir(path.parent) == [path.name]


def test_a_link_leads_to_the_file_that_is_replaced(path):
    link = path.with_name("link")
    link.symlink_to(path)
    write_sections(link, CONTENT, {"new": b"data"})
    assert link.is_symlink()
    assert read_sections(path, CONTENT) == {"new": b"data"}


def test_names_of_any_length_that_the_system_has(tmp_path):
    path = tmp_path / ("a" * 255)
    write_sections(path, CONTENT, SECTIONS)
    assert read_sections(path, CONTENT) == SECTIONS


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_who_may_read_a_file_stays_as_it_was(path, mode):
    path.chmod(mode)
    write_sections(path, CONTENT, {"new": b"data"})
    assert path.stat().st_mode & 0o777 == mode


def test_every_length_but_the_whole_is_refused(path):
    data = path.read_bytes()
    for length in [*range(0, len(data), 7), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(poptorch.Error, match=r"some\.file: "):
            read_sections(path, CONTENT)
    path.write_bytes(data + b"0")
    with pytest.raises(poptorch.Error, match="damaged: its length"):
        read_sections(path, CONTENT)


def test_bytes_that_change_are_noticed(path):
    data = path.read_bytes()
    for position in range(0, len(data), 5):
        spoilt = bytearray(data)
        spoilt[position] ^= 0x10
        path.write_bytes(spoilt)
        with pytest.raises(poptorch.Error, match=r"some\.file: "):
            read_sections(path, CONTENT)


@pytest.mark.parametrize("section", ["first", "last"])
def test_the_damaged_section_is_named(path, section):
    path.write_bytes(path.read_bytes().replace(SECTIONS[section], SECTIONS[section][::-1]))
    with pytest.raises(poptorch.Error, match=f"the section '{section}'"):
        read_sections(path, CONTENT)


def test_another_version_is_refused(path, monkeypatch):
    monkeypatch.setattr(container, "__version__", "99.0.0")
    with pytest.raises(UsageAssertionError, match=r"version 0.* and this is version 99\.0\.0"):
        read_sections(path, CONTENT)


def test_another_kind_of_file_is_refused(path):
    with pytest.raises(poptorch.Error, match="the file holds numbers, not words"):
        read_sections(path, "words")


@pytest.mark.parametrize(
    "data", [b"", b"import os\n", b"\x80\x02}q\x00.", b"PK\x03\x04", b"\0" * 999]
)
def test_files_of_others_are_refused(tmp_path, data):
    file = tmp_path / "file"
    file.write_bytes(data)
    with pytest.raises(poptorch.Error, match=r"not a file of popsim_torch"):
        read_sections(file, CONTENT)


def test_folders_and_missing_files_are_refused(tmp_path):
    for file in (tmp_path, tmp_path / "missing"):
        with pytest.raises(poptorch.Error, match="cannot be read"):
            read_sections(file, CONTENT)


@pytest.mark.timeout(10)
def test_a_pipe_is_refused_at_once_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(poptorch.Error, match="pipe: this is not a regular file"):
        read_sections(pipe, CONTENT)
    with pytest.raises(poptorch.Error, match=r"cannot be written .*not a regular file"):
        write_sections(pipe, CONTENT, SECTIONS)
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_device_is_refused():
    with pytest.raises(poptorch.Error, match="not a regular file"):
        read_sections("/dev/zero", CONTENT)
    with pytest.raises(poptorch.Error, match="not a regular file"):
        write_sections(Path("/dev/null"), CONTENT, SECTIONS)


def test_names_that_no_system_has_are_refused(tmp_path):
    with pytest.raises(poptorch.Error, match="null"):
        read_sections("a\0b", CONTENT)
    with pytest.raises(poptorch.Error, match="null"):
        write_sections(tmp_path / "a\0b", CONTENT, SECTIONS)


def test_a_size_of_the_head_that_no_file_has_is_refused(path):
    data = bytearray(path.read_bytes())
    data[13:21] = b"\xff" * 8
    path.write_bytes(data)
    with pytest.raises(poptorch.Error, match="its head"):
        read_sections(path, CONTENT)


# --- Whatever fails, the old file stays ---------------------------------------


class _FullDisk:
    """A file that fails after some writes."""

    def __init__(self, file, writes):
        self._file, self._left = file, writes

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, data):
        if self._left == 0:
            self._file.write(data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        self._left -= 1
        return self._file.write(data)


@pytest.mark.parametrize("writes", range(4))
def test_a_full_disk_leaves_the_old_file(path, monkeypatch, writes):
    real = builtins.open
    monkeypatch.setattr(
        whole_file,
        "open",
        lambda name, mode, **more: (
            _FullDisk(real(name, mode), writes) if mode == "xb" else real(name, mode, **more)
        ),
        raising=False,
    )
    with pytest.raises(poptorch.Error, match="No space left"):
        write_sections(path, CONTENT, {"a": b"1", "b": b"2", "c": b"3"})
    assert read_sections(path, CONTENT) == SECTIONS
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("problem", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_a_failing_step_leaves_the_old_file(path, monkeypatch, step, problem):
    def fail(*_):
        raise problem

    with monkeypatch.context() as patch, pytest.raises((poptorch.Error, KeyboardInterrupt)):
        patch.setattr(whole_file.os, step, fail)
        write_sections(path, CONTENT, {"new": b"data"})
    assert read_sections(path, CONTENT) == SECTIONS
    assert os.listdir(path.parent) == [path.name]


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(poptorch.Error, match="cannot be written"):
        write_sections(tmp_path / "missing" / "file", CONTENT, SECTIONS)


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_killed_writer_leaves_the_old_file(path, monkeypatch, step):
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(whole_file.os, step, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        write_sections(path, CONTENT, {"new": b"data"})
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert len(os.listdir(path.parent)) == 2
    assert read_sections(path, CONTENT) == SECTIONS


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"[" * 100_000,
        b'{"version": "0.1.0", "content": "numbers", "sections": 3}',
        b'{"version": "0.1.0", "content": "numbers", "sections": [[1]]}',
        b'{"version": "0.1.0", "content": "numbers", "sections": [["a", "b", "c"]]}',
        b'{"version": null, "content": "numbers", "sections": []}',
    ],
    ids=lambda head: head[:60],
)
def test_heads_that_make_no_sense_are_refused(path, head):
    size, digest = len(head).to_bytes(8, "little"), hashlib.sha256(head).digest()
    path.write_bytes(path.read_bytes()[:13] + size + digest + head)
    with pytest.raises(poptorch.Error, match=r"some\.file: "):
        read_sections(path, CONTENT)


def test_the_head_is_text_that_people_can_read(path):
    data = path.read_bytes()
    size = int.from_bytes(data[13:21], "little")
    head = json.loads(data[53 : 53 + size])
    assert head["version"] == poptorch.__version__
    assert [name for name, _, _ in head["sections"]] == list(SECTIONS)

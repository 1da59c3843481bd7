"""What a user names is opened only if it is a regular file, and read up to a limit."""

import os
from pathlib import Path

import pytest

from harness.common.line_file import LineFile
from harness.common.regular_file import lines_of, open_regular, parse_json, read_json, read_regular


def odd(path, kind):
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(f"/dev/{kind}")
    return path


@pytest.mark.parametrize("mode", ["rb", "rb+", "ab", "wb"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "zero", "null"])
def test_anything_else_is_refused_at_once(tmp_path, kind, mode):
    descriptors = set(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match=r"is not a regular file|a folder|Is a directory"):
        open_regular(odd(tmp_path / "odd", kind), mode)
    assert set(Path("/proc/self/fd").iterdir()) == descriptors


def test_a_regular_file_is_read_and_written_as_ever(tmp_path):
    path = tmp_path / "file"
    for mode, text in (("ab", b"one\n"), ("ab", b"two\n")):
        with open_regular(path, mode) as file:
            file.write(text)
    assert read_regular(path) == b"one\ntwo\n"
    with open_regular(path, "wb") as file:
        file.write(b"three")
    assert read_regular(path, 5) == b"three"
    with pytest.raises(OSError, match="is larger than"):
        read_regular(path, 4)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none")


def test_a_sparse_file_is_not_read_to_its_end(tmp_path):
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 3 << 30)
    with pytest.raises(OSError, match="is larger than 64 MiB"):
        read_regular(path)
    with open_regular(path) as file, pytest.raises(OSError, match="has a line of more than 64 MiB"):
        list(lines_of(file))


def test_lines_are_those_of_the_file(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"a\n\nbcd\nend")
    with open_regular(path) as file:
        assert list(lines_of(file, 4)) == [b"a\n", b"\n", b"bcd\n", b"end"]
    with open_regular(path) as file, pytest.raises(OSError, match="a line of more"):
        list(lines_of(file, 3))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\x00", b"\xff", "9" * 5000, '{"a":' * 50_000])
def test_what_is_no_json_is_a_value_error(tmp_path, text):
    with pytest.raises(ValueError):
        parse_json(text)
    path = tmp_path / "x.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError):
        read_json(path)


def test_a_record_file_with_an_endless_line_is_left_as_it_is(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"a": 1}\n')
    os.truncate(path, 100 << 20)
    with pytest.raises(OSError, match="a line of more"):
        LineFile(path).mend()
    assert path.stat().st_size == 100 << 20

"""What another user may have laid in a shared folder is not written to, nor through."""

import os

import pytest

from harness.api import HarnessError
from harness.batch.answer_file import AnswerFile
from harness.common import files
from harness.common.files import replace_with
from harness.common.locks import in_use, waiting
from harness.common.planted import refuse_planted
from harness.run.store import Store
from reports.render import write

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
SOMEBODY = 54321


@pytest.fixture
def shared(tmp_path):
    """A folder such as /tmp, beside a file of ours."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    (tmp_path / "mine").write_text("mine")
    return folder


def give_away(path):
    os.chown(path, SOMEBODY, SOMEBODY, follow_symlinks=False)
    return path


def link(shared):
    """Somebody's link to our file."""
    path = shared / "x.html"
    path.symlink_to(shared.parent / "mine")
    return give_away(path)


def folder(shared):
    path = shared / "results"
    path.mkdir(mode=0o777)
    return give_away(path)


WRITERS = {
    "replace": lambda path: replace_with(path, "x"),
    "report": lambda path: write(path, "x"),
    "answers": lambda path: AnswerFile(path, "model", False),
    "lock": lambda path: waiting(path, "it").__enter__(),
}


@pytest.mark.parametrize("writes", WRITERS.values(), ids=WRITERS)
def test_nothing_is_written_through_a_strangers_link(shared, writes):
    path = link(shared)
    with pytest.raises((HarnessError, OSError), match="another user's, in a folder that everybody may write to"):
        writes(path)
    assert (shared.parent / "mine").read_text() == "mine" and path.is_symlink()


@pytest.mark.parametrize("writes", WRITERS.values(), ids=WRITERS)
def test_nothing_is_written_in_a_strangers_folder(shared, writes):
    with pytest.raises((HarnessError, OSError), match="another user's"):
        writes(folder(shared) / "x.html")
    assert not list((shared / "results").iterdir())


def test_a_strangers_folder_is_neither_a_cache_nor_a_run_directory(shared):
    for use in (in_use(folder(shared)).__enter__, Store(shared / "results").open):
        with pytest.raises(HarnessError, match=r"another user's.*; choose another"):
            use()
    assert not list((shared / "results").iterdir())


def test_ours_roots_and_those_of_private_folders_are_no_traps(shared):
    ours = shared / "ours"
    ours.symlink_to(shared.parent / "mine")
    refuse_planted(ours)
    shared.chmod(0o1755)
    refuse_planted(link(shared))
    shared.chmod(0o1777)
    os.chown(shared, SOMEBODY, SOMEBODY)
    refuse_planted(shared / "x.html")  # of the folder's owner, who may change all in it


def test_a_link_in_the_place_of_a_temporary_file_is_not_opened(tmp_path, monkeypatch):
    (tmp_path / "mine").write_text("mine")
    monkeypatch.setattr(files.secrets, "token_hex", lambda count: "0")
    (tmp_path / f".a.json.0.{os.getpid()}.tmp").symlink_to(tmp_path / "mine")
    with pytest.raises(FileExistsError):
        replace_with(tmp_path / "a.json", "x")
    assert (tmp_path / "mine").read_text() == "mine"

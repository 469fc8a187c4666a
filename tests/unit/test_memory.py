"""Where the files of a run lie: in memory if there is enough, and where a person says otherwise, there."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests import memory


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that stands for the memory; what the run itself has is put back."""
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", "/asked/before")
    monkeypatch.setattr(memory, "will_do", lambda folder: folder == tmp_path)
    return tmp_path


def test_files_go_there_though_somebody_has_asked_before(folder: Path) -> None:
    memory.prefer_memory(folder)
    assert tempfile.gettempdir() == str(folder)


def test_a_folder_that_a_person_names_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/mine")
    memory.prefer_memory(folder)
    assert tempfile.tempdir == "/asked/before"


def test_one_that_will_not_do_is_left_alone(folder: Path) -> None:
    memory.prefer_memory(folder / "other")
    assert tempfile.tempdir == "/asked/before"


def test_it_must_be_there_and_have_room(tmp_path: Path) -> None:
    assert memory.will_do(tmp_path, enough=1)
    assert not memory.will_do(tmp_path, enough=2**60)
    assert not memory.will_do(tmp_path / "nowhere", enough=1)

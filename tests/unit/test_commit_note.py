"""The word beside an offset in the Kafka group: what is written is read back, and others' words say nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kconsume.backends import MemoryStore, SqliteStore, open_store
from kconsume.backends.commit_note import note_of, place_in, place_of, topic_id_in

TOPIC_ID = "rIcHkFgCTJyRFNxDBHqwMA"


@pytest.mark.parametrize("topic_id", [TOPIC_ID, None])
@pytest.mark.parametrize("place", ["0123456789ab", None])
def test_what_is_written_is_read_back(topic_id: str | None, place: str | None) -> None:
    note = note_of(topic_id, place)
    assert (topic_id_in(note), place_in(note)) == (topic_id, place)
    assert len(note.encode()) < 64, "what some brokers allow"


@pytest.mark.parametrize("note", ["", "kconsume/2 topic=a store=b", "topic=a store=b", "x kconsume/1 store=b", "NA"])
def test_the_word_of_another_tool_says_nothing(note: str) -> None:
    assert (topic_id_in(note), place_in(note)) == (None, None)


def test_a_word_of_before_there_were_places_is_read() -> None:
    assert topic_id_in(f"kconsume/1 topic={TOPIC_ID}") == TOPIC_ID


def test_two_files_of_one_name_in_two_folders_are_two_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        places.append(place_of(open_store("sqlite:///shop.db")))
        assert places[-1] == place_of(SqliteStore(tmp_path / name / "shop.db")), "however it is written"
    assert len(set(places)) == 2


def test_the_place_of_a_database_does_not_show_where_it_is() -> None:
    place = place_of(open_store("postgresql://shop:secret@db.internal/shop"))
    assert place is not None
    assert not {"db", "shop", "secret"} & set(place.split())
    assert place != place_of(open_store("postgresql://shop:secret@db2.internal/shop"))
    assert place == place_of(open_store(f"postgresql://shop:{os.getpid()}@db.internal/shop")), (
        "whatever the password is"
    )


def test_what_is_forgotten_with_the_process_has_no_place() -> None:
    assert place_of(MemoryStore()) is None

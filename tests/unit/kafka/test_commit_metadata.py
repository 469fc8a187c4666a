"""The word beside an offset in the Kafka group: what is written is read back, and others' words say nothing."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconsume._kafka.commit_metadata import (
    KAFKA,
    MirrorSource,
    StoreName,
    name_of,
    note_of,
    number_in,
    numbered,
    source_in,
    topic_id_in,
)
from kconsume.backends import MemoryStore, SqliteStore, open_store
from kconsume.backends.capabilities import Capabilities

TOPIC_ID = "rIcHkFgCTJyRFNxDBHqwMA"
OURS = StoreName("p", "aX3d_9-Q", "0123456789ab")


@given(st.sampled_from([TOPIC_ID, None]), st.integers(0, 36**10 - 1))
def test_what_is_written_is_read_back(topic_id: str | None, epoch: int) -> None:
    note = note_of(topic_id, OURS, epoch)
    assert (topic_id_in(note), source_in(note)) == (topic_id, MirrorSource("p", OURS.id, epoch or None))
    assert len(note.encode()) <= 64, "what some brokers allow"


@given(
    st.sampled_from([TOPIC_ID, None]), st.sampled_from([OURS, None]), st.integers(0, 36**10 - 1), st.integers(0, 1295)
)
def test_a_number_is_read_back_and_leaves_the_rest_as_it_was(
    topic_id: str | None, name: StoreName | None, epoch: int, number: int
) -> None:
    plain = note_of(topic_id, name, epoch)
    note = numbered(plain, number)
    assert (number_in(note), topic_id_in(note)) == (number, topic_id)
    said, before = source_in(note), source_in(plain)
    assert said == before or (said == MirrorSource("p", OURS.id) and epoch >= 36**6), "unless there is no room"
    assert len(note.encode()) <= 64, "what some brokers allow"


def test_an_epoch_has_64_bits() -> None:
    assert source_in(note_of(TOPIC_ID, OURS, 2**63 - 1)) == MirrorSource("p", OURS.id, 2**63 - 1)


def test_kafka_s_own_offsets_say_that_they_are() -> None:
    note = note_of(TOPIC_ID, KAFKA, 0)
    assert (topic_id_in(note), source_in(note)) == (TOPIC_ID, MirrorSource("k"))
    assert note_of(None, None) == ""


@pytest.mark.parametrize(
    "note", ["", "kconsume/2 topic=a at=pabcdefgh", "topic=a store=b", "x kconsume/1 store=b", "NA", "kconsume/1 at=P"]
)
def test_the_word_of_another_tool_says_nothing(note: str) -> None:
    assert (topic_id_in(note), source_in(note)) == (None, None)


def test_the_words_of_earlier_versions_are_read() -> None:
    assert topic_id_in(f"kconsume/1 topic={TOPIC_ID}") == TOPIC_ID
    assert source_in(f"kconsume/1 topic={TOPIC_ID}") is None
    by_place = source_in(f"kconsume/1 topic={TOPIC_ID} store=0123456789ab")
    assert by_place is not None
    assert by_place.is_of(OURS)
    assert not by_place.is_of(StoreName("p", "aX3d_9-Q", "ba9876543210"))
    assert not by_place.is_of(KAFKA)


def test_earlier_versions_read_the_topic_and_no_other_store() -> None:
    """By what they look for: with a store that they do not know they would refuse to start in a rolling deployment."""
    note = note_of(TOPIC_ID, OURS, 71)
    assert re.match(r"kconsume/1 (?:\S+ )*?topic=(\S+)", note)
    assert not re.match(r"kconsume/1 (?:\S+ )*?store=(\S+)", note)


@pytest.mark.usefixtures("sqlite_stores_are_closed")
def test_a_copy_of_a_file_is_another_store_and_however_it_is_written_a_file_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with_rows = SqliteStore(tmp_path / "a" / "shop.db")
    named = name_of(with_rows)
    with_rows.close()
    (tmp_path / "b" / "shop.db").write_bytes((tmp_path / "a" / "shop.db").read_bytes())
    monkeypatch.chdir(tmp_path / "a")
    assert name_of(open_store("sqlite:///shop.db")) == named
    monkeypatch.chdir(tmp_path / "b")
    copied = name_of(open_store("sqlite:///shop.db"))
    assert named is not None
    assert copied is not None
    assert copied.id != named.id


def test_a_file_that_was_made_anew_is_another_store(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    names = []
    for _ in range(2):
        store = SqliteStore(path)
        names.append(name_of(store))
        store.close()
        for file in tmp_path.iterdir():
            file.unlink()
    assert names[0] != names[1]


class Nameless(MemoryStore):
    """A third party's, without a name of its own."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(self)


def test_a_store_without_a_name_goes_by_its_address_which_is_not_shown() -> None:
    one, other = (name_of(Nameless(f"etcd://shop:secret@{host}/shop")) for host in ("one", "two"))
    assert one is not None
    assert other is not None
    assert one.kind == "x"
    assert one.id != other.id
    assert not {"etcd", "shop", "secret", str(os.getpid())} & set(re.split(r"\W", note_of(None, one, 1)))


def test_what_is_forgotten_with_the_process_has_no_name() -> None:
    assert name_of(MemoryStore()) is None

"""How watermarks reach a store, and what its answer is taken to mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from kconsume._kafka.commit_metadata import number_in
from kconsume._kafka.commit_result import CommitResult, OffsetToCommit
from kconsume._kafka.consumer import KafkaConsumer
from kconsume._kafka.fetched import FetchedMessages
from kconsume._runtime.assignment import committer as commits
from kconsume._runtime.assignment.committer import CommitEntries, CommitEntry, GroupCommitter, Receipt, StoreCommitter
from kconsume._runtime.assignment.partition import OwnedPartition
from kconsume._runtime.background import BackgroundThread
from kconsume.backends import MemoryStore, Position
from kconsume.backends.base import Positions
from kconsume.backends.claim import granted
from kconsume.errors import ClientFailed, Fenced, StoreUnavailable
from kconsume.records import Partition
from tests.waiting import eventually

GROUP = "shop"
GENERATION = 3
PARTITIONS = [Partition("orders", number) for number in range(3)]


@pytest.fixture
def background() -> Iterator[BackgroundThread]:
    background = BackgroundThread("background")
    yield background
    assert background.close(20)


def held(store: MemoryStore) -> dict[Partition, OwnedPartition]:
    """The partitions, claimed and held."""
    claimed = granted(store.claim(GROUP, PARTITIONS, "me", lambda ps: dict.fromkeys(ps, Position(0))))
    owned_partitions = {}
    for partition, position in claimed.items():
        owned_partitions[partition] = OwnedPartition(partition)
        owned_partitions[partition].epoch, owned_partitions[partition].stored = position.epoch, position.next_offset
    return owned_partitions


def receipt_of(committer: StoreCommitter) -> Receipt:
    return eventually(committer.collect, what="a receipt") or Receipt({}, {}, "none came")


def test_what_is_kept_is_known_to_be_kept(background: BackgroundThread) -> None:
    store = MemoryStore()
    owned_partitions, committer = held(store), StoreCommitter(store, GROUP, background)
    marks = {p: CommitEntry(h, 5 + p.number, h) for p, h in owned_partitions.items()}
    owned_partitions[PARTITIONS[0]].topic_id, owned_partitions[PARTITIONS[0]].leader_epoch = "A", 7
    busy = [committer.busy]
    committer.send(marks)
    busy.append(committer.busy)
    assert receipt_of(committer) == Receipt(marks, {})
    assert [*busy, committer.busy] == [False, True, False]
    assert committer.collect() is None
    rows = store.load(GROUP, PARTITIONS)
    assert [rows[p].next_offset for p in PARTITIONS] == [5, 6, 7]
    assert (rows[PARTITIONS[0]].topic_id, rows[PARTITIONS[0]].leader_epoch) == ("A", 7)


def test_one_partition_that_is_fenced_does_not_hold_the_others_back(background: BackgroundThread) -> None:
    store = MemoryStore()
    owned_partitions, committer = held(store), StoreCommitter(store, GROUP, background)
    store.claim(GROUP, [PARTITIONS[1]], "rival", lambda _: {})
    committer.send({p: CommitEntry(h, 5, h) for p, h in owned_partitions.items()})
    receipt = receipt_of(committer)
    assert receipt.kept.keys() == {PARTITIONS[0], PARTITIONS[2]}
    assert receipt.fenced.keys() == {PARTITIONS[1]}
    assert isinstance(receipt.fenced[PARTITIONS[1]][1], Fenced)
    assert [store.load(GROUP, PARTITIONS)[p].next_offset for p in PARTITIONS] == [5, 0, 5]


class Faulty(MemoryStore):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def save(self, group: str, positions: Positions) -> None:
        raise self._error


def test_a_store_that_is_away_keeps_nothing_and_nobody_is_fenced(background: BackgroundThread) -> None:
    store = Faulty(StoreUnavailable("disk full"))
    committer = StoreCommitter(store, GROUP, background)
    committer.send({p: CommitEntry(h, 5, h) for p, h in held(store).items()})
    assert receipt_of(committer) == Receipt({}, {}, "disk full")


def test_an_error_that_nobody_foresaw_is_raised(background: BackgroundThread) -> None:
    store = Faulty(LookupError("a bug"))
    committer = StoreCommitter(store, GROUP, background)
    committer.send({p: CommitEntry(h, 5, h) for p, h in held(store).items()})
    with pytest.raises(LookupError, match="a bug"):
        eventually(committer.collect, what="a receipt")


# The Kafka group


class Refusing:
    """A client that answers for the broker."""

    def __init__(self, code: int) -> None:
        self._error = KafkaError(code)

    def commit(self, offsets: list[TopicPartition], *, asynchronous: bool) -> None:
        raise KafkaException(self._error)

    def consumer_group_metadata(self) -> bytes:
        return b""


@pytest.mark.parametrize("advisory", [True, False])
@pytest.mark.parametrize(
    ("code", "level"),
    [
        (KafkaError.REBALANCE_IN_PROGRESS, "INFO"),
        (KafkaError.ILLEGAL_GENERATION, "INFO"),
        (KafkaError.STALE_MEMBER_EPOCH, "INFO"),
        (KafkaError.UNKNOWN_MEMBER_ID, "WARNING"),
        (KafkaError.COORDINATOR_NOT_AVAILABLE, "WARNING"),
    ],
)
def test_a_commit_that_meets_a_rebalance_is_no_warning(
    code: int, level: str, advisory: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    source = Group()
    source._consumer, source._fetched = cast(Any, Refusing(code)), FetchedMessages(None, 1000)
    committer = GroupCommitter(source, advisory=advisory)
    committer.send(marks := {PARTITIONS[0]: CommitEntry(owned := OwnedPartition(PARTITIONS[0]), 5, owned)})
    KafkaConsumer.commit(source, {p: OffsetToCommit(entry.offset, None, "") for p, entry in marks.items()})
    receipt = committer.collect()
    assert receipt is not None
    assert not receipt.kept, "so it is sent again"
    assert [(r.levelname, r.getMessage().partition(" cause=")[0]) for r in caplog.records] == [
        (level, "commit refused")
    ]


class Group(KafkaConsumer):
    """A source that only commits, and is answered by the test."""

    def __init__(self) -> None:
        self.commit_results: list[CommitResult] = []
        self.sent: list[Mapping[Partition, OffsetToCommit]] = []
        self._subscribed, self._group = True, "shop"

    def commit(self, offsets: Mapping[Partition, OffsetToCommit]) -> None:
        self.sent.append(offsets)

    def generation(self) -> int:
        return GENERATION


ONE, TWO = ({p: CommitEntry(OwnedPartition(p), offset, p)} for p, offset in [(PARTITIONS[0], 5), (PARTITIONS[1], 7)])


def answer(marks: CommitEntries, error: str | None = None, refusal: ClientFailed | None = None) -> CommitResult:
    refused = {} if error is None else dict.fromkeys(marks)
    return CommitResult({p: entry.offset for p, entry in marks.items()}, error, refusal, refused, GENERATION)


def test_an_answer_is_taken_for_the_commit_that_it_names_whatever_the_order() -> None:
    source = Group()
    committer = GroupCommitter(source)
    committer.send(ONE)
    committer.send(TWO)
    source.commit_results += [answer(TWO), answer(ONE, "moved")]
    answers = [(committer.collect(), committer.busy) for _ in range(3)]
    assert answers == [(Receipt(TWO, {}, None, GENERATION), True), (Receipt({}, {}, "moved"), False), (None, False)]


@pytest.mark.parametrize("offsets", [{PARTITIONS[0]: 4}, {PARTITIONS[0]: -1001}, {PARTITIONS[0]: 5, PARTITIONS[2]: 1}])
def test_an_answer_that_matches_nothing_proves_nothing_and_holds_nothing_up(
    offsets: dict[Partition, int], caplog: pytest.LogCaptureFixture
) -> None:
    source = Group()
    committer = GroupCommitter(source)
    committer.send(ONE)
    committer.send(TWO)
    source.commit_results += [CommitResult(offsets, None, generation=GENERATION), answer(TWO)]
    assert committer.collect() == Receipt({}, {})
    assert "these offsets were not sent" in caplog.text
    assert committer.collect() == Receipt(TWO, {}, None, GENERATION), "another commit is answered as before"
    assert not committer.busy, "what the answer was about is sent again"


def test_an_answer_that_comes_twice_changes_nothing() -> None:
    source = Group()
    committer = GroupCommitter(source)
    committer.send(ONE)
    source.commit_results += [answer(ONE), answer(ONE)]
    assert [committer.collect(), committer.collect(), committer.collect()] == [
        Receipt(ONE, {}, None, GENERATION),
        Receipt({}, {}),
        None,
    ]


def answer_to(sent: Mapping[Partition, OffsetToCommit]) -> CommitResult:
    """As the client gives it: with what was sent."""
    numbers = {number_in(mark.metadata) for mark in sent.values()}
    return CommitResult({p: mark.offset for p, mark in sent.items()}, None, generation=GENERATION, number=numbers.pop())


def given_up(monkeypatch: pytest.MonkeyPatch, *sent: CommitEntries) -> tuple[Group, GroupCommitter]:
    """A ledger whose first commits were not answered in time."""
    source = Group()
    ledger = GroupCommitter(source)
    with monkeypatch.context() as at_once:
        at_once.setattr(commits, "UNANSWERED", 0.0)
        for marks in sent:
            ledger.send(marks)
            assert ledger.busy
            assert ledger.collect() is None
    return source, ledger


def test_a_commit_that_is_not_answered_is_waited_for_until_its_coordinator_counts_as_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, ledger = given_up(monkeypatch, ONE)
    assert not ledger.busy, "the next one may be sent"
    assert 'coordinator lost partitions=orders/0 cause="no answer to a commit' in caplog.text
    ledger.send(TWO)
    assert (ledger.busy, ledger.collect()) == (True, None)
    source.commit_results.append(answer_to(source.sent[1]))
    assert (ledger.collect(), ledger.busy) == (Receipt(TWO, {}, None, GENERATION), False)


@pytest.mark.parametrize("late_first", [True, False])
def test_a_late_answer_is_not_that_to_a_newer_commit_of_the_same_offsets(
    monkeypatch: pytest.MonkeyPatch, late_first: bool
) -> None:
    """By the late one nobody is confirmed: it was sent before the row was read that is to be claimed."""
    source, ledger = given_up(monkeypatch, ONE, ONE)
    newest = {p: entry._replace(token="newer") for p, entry in ONE.items()}
    ledger.send(newest)
    first, _, last = source.sent
    source.commit_results += [answer_to(first), answer_to(last)] if late_first else [answer_to(last), answer_to(first)]
    receipts = [(ledger.collect(), ledger.busy) for _ in range(2)]
    late, answered = Receipt(ONE, {}), Receipt(newest, {}, None, GENERATION)
    assert receipts == ([(late, True), (answered, False)] if late_first else [(answered, False), (late, False)])


def test_what_is_refused_for_good_is_raised() -> None:
    source = Group()
    committer = GroupCommitter(source)
    committer.send(ONE)
    source.commit_results.append(answer(ONE, "no", ClientFailed("not allowed")))
    with pytest.raises(ClientFailed, match="not allowed"):
        committer.collect()
    assert not committer.busy


def test_an_offset_that_is_refused_does_not_hold_back_the_others() -> None:
    """One topic is gone; the broker answers for each partition by itself."""
    source = Group()
    committer = GroupCommitter(source)
    both = {**ONE, **TWO}
    committer.send(both)
    source.commit_results.append(answer(both, "unknown topic")._replace(refused=dict.fromkeys(TWO)))
    assert committer.collect() == Receipt(ONE, {}, "unknown topic", GENERATION)


def test_what_is_advisory_may_be_refused_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    source = Group()
    committer = GroupCommitter(source, advisory=True)
    for _ in range(3):
        committer.send(ONE)
        source.commit_results.append(answer(ONE, "no", ClientFailed("not allowed")))
        assert committer.collect() == Receipt({}, {}, "no")
    assert len(caplog.records) == 1


def test_an_answer_under_another_generation_confirms_nobody() -> None:
    """A commit that was put off may be sent under a later generation, and be accepted from a member that is none."""
    source = Group()
    committer = GroupCommitter(source)
    committer.send(ONE)
    source.commit_results.append(answer(ONE)._replace(generation=GENERATION + 1))
    receipt = committer.collect()
    assert receipt is not None
    assert (receipt.kept, receipt.generation) == (ONE, None)


def test_a_save_whose_answer_was_lost_is_made_again_as_it_was(background: BackgroundThread) -> None:
    """Whether it was kept is not known; from the offset before it, a later one would be refused."""
    store = LosesAnswers()
    owned_partitions, committer = held(store), StoreCommitter(store, GROUP, background)
    first = PARTITIONS[0]
    owned = owned_partitions[first]
    committer.send({first: CommitEntry(owned, 5, owned)})
    assert receipt_of(committer).error == "the answer was lost"
    committer.send({first: CommitEntry(owned, 9, owned)})
    kept = receipt_of(committer).kept[first]
    assert kept.offset == 5
    owned.stored = kept.offset
    committer.send({first: CommitEntry(owned, 9, owned)})
    assert receipt_of(committer).kept[first].offset == 9
    assert store.load(GROUP, [first])[first].next_offset == 9


class LosesAnswers(MemoryStore):
    """Keeps the first save and says that it was away."""

    _lost = False

    def save(self, group: str, positions: Positions) -> None:
        super().save(group, positions)
        if not self._lost:
            self._lost = True
            raise StoreUnavailable("the answer was lost")

"""How watermarks reach a store, and what its answer is taken to mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from kconsume.backends import MemoryStore, Position
from kconsume.backends.abc import Positions
from kconsume.backends.claiming import granted
from kconsume.errors import ClientFailed, Fenced, StoreUnavailable
from kconsume.records import Partition
from kconsume.runtime.arrivals import Arrivals
from kconsume.runtime.commits import Entry, GroupLedger, Marks, Receipt, StoreLedger
from kconsume.runtime.errands import Errands
from kconsume.runtime.holding import Holding
from kconsume.runtime.source import CommitResult, Mark, Source
from tests.waiting import eventually

GROUP = "shop"
GENERATION = 3
PARTITIONS = [Partition("orders", number) for number in range(3)]


@pytest.fixture
def errands() -> Iterator[Errands]:
    errands = Errands("errands")
    yield errands
    assert errands.close(20)


def held(store: MemoryStore) -> dict[Partition, Holding]:
    """The partitions, claimed and held."""
    claimed = granted(store.claim(GROUP, PARTITIONS, "me", lambda ps: dict.fromkeys(ps, Position(0))))
    holdings = {}
    for partition, position in claimed.items():
        holdings[partition] = Holding(partition)
        holdings[partition].epoch, holdings[partition].stored = position.epoch, position.next_offset
    return holdings


def receipt_of(ledger: StoreLedger) -> Receipt:
    return eventually(ledger.collect, what="a receipt") or Receipt({}, {}, "none came")


def test_what_is_kept_is_known_to_be_kept(errands: Errands) -> None:
    store = MemoryStore()
    holdings, ledger = held(store), StoreLedger(store, GROUP, errands)
    marks = {p: Entry(h, 5 + p.number, h) for p, h in holdings.items()}
    holdings[PARTITIONS[0]].topic_id, holdings[PARTITIONS[0]].leader_epoch = "A", 7
    busy = [ledger.busy]
    ledger.send(marks)
    busy.append(ledger.busy)
    assert receipt_of(ledger) == Receipt(marks, {})
    assert [*busy, ledger.busy] == [False, True, False]
    assert ledger.collect() is None
    rows = store.load(GROUP, PARTITIONS)
    assert [rows[p].next_offset for p in PARTITIONS] == [5, 6, 7]
    assert (rows[PARTITIONS[0]].topic_id, rows[PARTITIONS[0]].leader_epoch) == ("A", 7)


def test_one_partition_that_is_fenced_does_not_hold_the_others_back(errands: Errands) -> None:
    store = MemoryStore()
    holdings, ledger = held(store), StoreLedger(store, GROUP, errands)
    store.claim(GROUP, [PARTITIONS[1]], "rival", lambda _: {})
    ledger.send({p: Entry(h, 5, h) for p, h in holdings.items()})
    receipt = receipt_of(ledger)
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


def test_a_store_that_is_away_keeps_nothing_and_nobody_is_fenced(errands: Errands) -> None:
    store = Faulty(StoreUnavailable("disk full"))
    ledger = StoreLedger(store, GROUP, errands)
    ledger.send({p: Entry(h, 5, h) for p, h in held(store).items()})
    assert receipt_of(ledger) == Receipt({}, {}, "disk full")


def test_an_error_that_nobody_foresaw_is_raised(errands: Errands) -> None:
    store = Faulty(LookupError("a bug"))
    ledger = StoreLedger(store, GROUP, errands)
    ledger.send({p: Entry(h, 5, h) for p, h in held(store).items()})
    with pytest.raises(LookupError, match="a bug"):
        eventually(ledger.collect, what="a receipt")


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
    source._consumer, source._arrivals = cast(Any, Refusing(code)), Arrivals(None, 1000)
    ledger = GroupLedger(source, advisory=advisory)
    ledger.send(marks := {PARTITIONS[0]: Entry(holding := Holding(PARTITIONS[0]), 5, holding)})
    Source.commit(source, {p: Mark(entry.offset, None, "") for p, entry in marks.items()})
    receipt = ledger.collect()
    assert receipt is not None
    assert not receipt.kept, "so it is sent again"
    assert [(r.levelname, r.getMessage().partition(",")[0]) for r in caplog.records] == [(level, "commit refused")]


class Group(Source):
    """A source that only commits, and is answered by the test."""

    def __init__(self) -> None:
        self.commit_results: list[CommitResult] = []
        self._subscribed = True

    def commit(self, marks: Mapping[Partition, Mark]) -> None: ...

    def generation(self) -> int:
        return GENERATION


ONE, TWO = ({p: Entry(Holding(p), offset, p)} for p, offset in [(PARTITIONS[0], 5), (PARTITIONS[1], 7)])


def answer(marks: Marks, error: str | None = None, refusal: ClientFailed | None = None) -> CommitResult:
    refused = {} if error is None else dict.fromkeys(marks)
    return CommitResult({p: entry.offset for p, entry in marks.items()}, error, refusal, refused, GENERATION)


def test_an_answer_is_taken_for_the_commit_that_it_names_whatever_the_order() -> None:
    source = Group()
    ledger = GroupLedger(source)
    ledger.send(ONE)
    ledger.send(TWO)
    source.commit_results += [answer(TWO), answer(ONE, "moved")]
    answers = [(ledger.collect(), ledger.busy) for _ in range(3)]
    assert answers == [(Receipt(TWO, {}, None, GENERATION), True), (Receipt({}, {}, "moved"), False), (None, False)]


@pytest.mark.parametrize("offsets", [{PARTITIONS[0]: 4}, {PARTITIONS[0]: -1001}, {PARTITIONS[0]: 5, PARTITIONS[2]: 1}])
def test_an_answer_that_matches_nothing_proves_nothing_and_holds_nothing_up(
    offsets: dict[Partition, int], caplog: pytest.LogCaptureFixture
) -> None:
    source = Group()
    ledger = GroupLedger(source)
    ledger.send(ONE)
    ledger.send(TWO)
    source.commit_results += [CommitResult(offsets, None, generation=GENERATION), answer(TWO)]
    assert ledger.collect() == Receipt({}, {})
    assert "offsets that were not sent" in caplog.text
    assert ledger.collect() == Receipt(TWO, {}, None, GENERATION), "another commit is answered as before"
    assert not ledger.busy, "what the answer was about is sent again"


def test_an_answer_that_comes_twice_changes_nothing() -> None:
    source = Group()
    ledger = GroupLedger(source)
    ledger.send(ONE)
    source.commit_results += [answer(ONE), answer(ONE)]
    assert [ledger.collect(), ledger.collect(), ledger.collect()] == [
        Receipt(ONE, {}, None, GENERATION),
        Receipt({}, {}),
        None,
    ]


def test_what_is_refused_for_good_is_raised() -> None:
    source = Group()
    ledger = GroupLedger(source)
    ledger.send(ONE)
    source.commit_results.append(answer(ONE, "no", ClientFailed("not allowed")))
    with pytest.raises(ClientFailed, match="not allowed"):
        ledger.collect()
    assert not ledger.busy


def test_an_offset_that_is_refused_does_not_hold_back_the_others() -> None:
    """One topic is gone; the broker answers for each partition by itself."""
    source = Group()
    ledger = GroupLedger(source)
    both = {**ONE, **TWO}
    ledger.send(both)
    source.commit_results.append(answer(both, "unknown topic")._replace(refused=dict.fromkeys(TWO)))
    assert ledger.collect() == Receipt(ONE, {}, "unknown topic", GENERATION)


def test_what_is_advisory_may_be_refused_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    source = Group()
    ledger = GroupLedger(source, advisory=True)
    for _ in range(3):
        ledger.send(ONE)
        source.commit_results.append(answer(ONE, "no", ClientFailed("not allowed")))
        assert ledger.collect() == Receipt({}, {}, "no")
    assert len(caplog.records) == 1


def test_an_answer_under_another_generation_confirms_nobody() -> None:
    """A commit that was put off may be sent under a later generation, and be accepted from a member that is none."""
    source = Group()
    ledger = GroupLedger(source)
    ledger.send(ONE)
    source.commit_results.append(answer(ONE)._replace(generation=GENERATION + 1))
    receipt = ledger.collect()
    assert receipt is not None
    assert (receipt.kept, receipt.generation) == (ONE, None)


def test_a_save_whose_answer_was_lost_is_made_again_as_it_was(errands: Errands) -> None:
    """Whether it was kept is not known; from the offset before it, a later one would be refused."""
    store = LosesAnswers()
    holdings, ledger = held(store), StoreLedger(store, GROUP, errands)
    first = PARTITIONS[0]
    holding = holdings[first]
    ledger.send({first: Entry(holding, 5, holding)})
    assert receipt_of(ledger).error == "the answer was lost"
    ledger.send({first: Entry(holding, 9, holding)})
    kept = receipt_of(ledger).kept[first]
    assert kept.offset == 5
    holding.stored = kept.offset
    ledger.send({first: Entry(holding, 9, holding)})
    assert receipt_of(ledger).kept[first].offset == 9
    assert store.load(GROUP, [first])[first].next_offset == 9


class LosesAnswers(MemoryStore):
    """Keeps the first save and says that it was away."""

    _lost = False

    def save(self, group: str, positions: Positions) -> None:
        super().save(group, positions)
        if not self._lost:
            self._lost = True
            raise StoreUnavailable("the answer was lost")

"""Reads topics of dead letters: all letters by cause, one letter by its place, and which letters were sent back.

Reads up to the end that a topic had when the read began. Joins no group and commits nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, TypeAlias

from kconsume._config.client_settings import ClientValue, client_settings
from kconsume._kafka.cluster import Cluster
from kconsume._kafka.topic_reader import RecordPlace, TopicReader
from kconsume.backends.dead_letters.reader import CauseSummary, PurgeSelection
from kconsume.cli.broker_address import connect_address
from kconsume.errors import ConfigurationError
from kconsume.failures.letter_headers import PREFIX, Letter, read_added_headers, redrive_topic, reset_epoch_in
from kconsume.records import Partition, Record, record_of

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Failing: TypeAlias = tuple[str, int, int]
"""Identifies one failure of a record: its origin, the reset epoch under which it was read, and how often it had been
sent back."""


class TopicSummary(NamedTuple):
    """What a topic of dead letters holds."""

    records: int
    causes: list[CauseSummary]
    others: int
    """Records of the topic that are no dead letters."""


class TopicPurge(NamedTuple):
    """What a purge of a topic deletes. Kafka deletes records from the beginning of a partition only."""

    letters: int
    """All letters of the topic."""
    deleted: int
    """Letters of the selection that are at the beginning of their partition."""
    behind: int
    """Letters of the selection that are behind a record that stays."""
    ends: Mapping[Partition, int]
    """For each partition, the first offset that stays."""


class LetterTopics:
    """The topics of dead letters of one cluster. The first call of a method connects."""

    def __init__(self, brokers: str, kafka: Mapping[str, ClientValue]) -> None:
        """
        Args:
            brokers: the cluster's address; an embedded broker must be running.
            kafka: the user's own client properties.
        """
        self.brokers = brokers
        self.kafka = kafka

    def summary(self, topic: str, since: datetime | None = None, group: str | None = None) -> TopicSummary:
        """Count the letters of a topic by the topic of their records and by cause.

        Args:
            since: only letters from this time on. The time of a letter is the time of the record, or the time when the
                letter was written if the topic has `LogAppendTime`.
            group: only letters that failed in this consumer group.
        """
        causes: dict[tuple[str, str], CauseSummary] = {}
        failings: list[tuple[tuple[str, str], Failing]] = []
        groups: set[str] = set()
        records = others = 0
        for record in self.records(topic):
            records += 1
            letter = letter_in(record)
            if letter is None:
                others += 1
            elif _is_wanted(record, letter, since, group):
                key = letter.partition.topic, letter.exception
                causes[key] = _with(causes.get(key), letter, record)
                failings.append((key, failing_of(letter)))
                groups.add(letter.group)
        sent = self.sent_back(groups)
        counts = Counter(key for key, failing in failings if failing in sent)
        return TopicSummary(records, [replace(causes[key], sent_back=counts[key]) for key in sorted(causes)], others)

    def records(self, topic: str) -> Iterator[Record]:
        """All records that the topic holds now, in the order of each partition, without aborted transactions."""
        return (record_of(message, "") for message in self._reader().topic(topic))

    def letter(self, place: RecordPlace) -> Letter:
        """The letter at this place. Raises `ConfigurationError` if there is none."""
        letter = letter_in(record_of(self._reader().record(place), ""))
        if letter is None:
            raise ConfigurationError(
                f"{place} is not a dead letter, because it has no header kconsume-origin: choose one that "
                f"`kconsume dlq list` shows"
            )
        return letter

    def sent_back(self, groups: Collection[str]) -> set[Failing]:
        """The failures that were sent back to these groups. Each group has redrive topics of its own."""
        endings = tuple(redrive_topic("", group) for group in groups)
        if not endings:
            return set()
        return self.sent_to(name for name in self._cluster().all_topics() if name.endswith(endings))

    def sent_to(self, topics: Iterable[str]) -> set[Failing]:
        """The failures whose dead letters were sent back through these topics."""
        sent: set[Failing] = set()
        for topic in topics:
            for record in self.records(topic):
                headers = read_added_headers(record.headers)
                times = headers.get("redriven", "")
                if times.isdecimal():
                    sent.add((headers.get("origin", ""), reset_epoch_in(headers), int(times) - 1))
        return sent

    def purgeable(self, topic: str, selection: PurgeSelection) -> TopicPurge:
        """What a purge deletes: in each partition, the letters of the selection before the first record that stays.

        A record that is no dead letter always stays.
        """
        sent: set[Failing] = set()
        if selection.sent_back:
            sent = self.sent_back({letter.group for record in self.records(topic) if (letter := letter_in(record))})
        letters = deleted = behind = 0
        ends: dict[Partition, int] = {}
        stays: set[Partition] = set()
        for record in self.records(topic):
            partition, letter = Partition(record.topic, record.partition), letter_in(record)
            letters += letter is not None
            if letter is None or not _is_selected(record, letter, selection, sent):
                stays.add(partition)
            elif partition in stays:
                behind += 1
            else:
                deleted += 1
                ends[partition] = record.offset + 1
        return TopicPurge(letters, deleted, behind, ends)

    def purge(self, ends: Mapping[Partition, int]) -> None:
        """Delete the records of each partition below an offset, for good."""
        if self.brokers.startswith("embedded://"):
            from kconsume._embedded.named_broker import attach

            broker = attach(self.brokers.removeprefix("embedded://"))
            for partition, end in ends.items():
                broker.delete_records(*partition, end)
            return
        from kconsume._kafka.topic_retention import delete_records

        delete_records(self.brokers, self.kafka, ends)

    def _cluster(self) -> Cluster:
        return Cluster(connect_address(self.brokers), self.kafka)

    def _reader(self) -> TopicReader:
        cluster = self._cluster()
        kafka = {**self.kafka, "isolation.level": "read_committed"}
        settings = client_settings(cluster.brokers, "kconsume-dlq", kafka, embedded=cluster.brokers != self.brokers)
        return TopicReader(cluster, settings)


def letter_in(record: Record) -> Letter | None:
    """Read a dead letter from its record. None if the record has no header `kconsume-origin`."""
    headers = read_added_headers(record.headers)
    if "origin" not in headers:
        return None
    return Letter(
        Partition(headers.get("topic", "?"), _number(headers.get("partition"))),
        _number(headers.get("offset")),
        headers.get("group", "?"),
        headers["origin"],
        _number(headers.get("attempts")),
        headers.get("exception", "?"),
        headers.get("message", ""),
        headers.get("trace", ""),
        record.key,
        record.value,
        _moment(headers.get("timestamp", "")),
        tuple(pair for pair in record.headers if not pair[0].startswith(PREFIX)),
        redriven=max(0, _number(headers.get("redriven"))),
        reset_epoch=reset_epoch_in(headers),
    )


def failing_of(letter: Letter) -> Failing:
    """The failure that a letter describes."""
    return letter.origin, letter.reset_epoch, letter.redriven


def _number(text: str | None) -> int:
    """The number, or -1 for any other text, because other programs may have written the header."""
    return int(text) if text is not None and text.isdecimal() and text.isascii() else -1


def _moment(text: str) -> datetime | None:
    try:
        return _EPOCH + timedelta(milliseconds=int(text))
    except (ValueError, OverflowError):
        pass
    try:
        return datetime.fromisoformat(text).astimezone(UTC)  # the format of `kconsume failed dead-letter`
    except (ValueError, OverflowError):
        return None


def _is_wanted(record: Record, letter: Letter, since: datetime | None, group: str | None) -> bool:
    if group is not None and letter.group != group:
        return False
    return since is None or (record.timestamp is not None and record.timestamp >= since)


def _is_selected(record: Record, letter: Letter, selection: PurgeSelection, sent: set[Failing]) -> bool:
    if selection.group is not None and letter.group != selection.group:
        return False
    if selection.sent_back and failing_of(letter) not in sent:
        return False
    before = selection.before
    return before is None or (record.timestamp is not None and record.timestamp < before)


def _with(cause: CauseSummary | None, letter: Letter, record: Record) -> CauseSummary:
    at, place = record.timestamp, str(RecordPlace(Partition(record.topic, record.partition), record.offset))
    if cause is None:
        return CauseSummary(letter.partition.topic, letter.exception, 1, at, at, place)
    times = [time for time in (cause.first, cause.last, at) if time is not None]
    return CauseSummary(
        cause.topic, cause.cause, cause.count + 1, min(times, default=None), max(times, default=None), place
    )  # fmt: skip

"""Sends the dead letters of a topic back. Each letter is sent once, even if the command is killed and run again.

    fence ─► read what was sent ─► chunk: begin, send, commit ─► chunk …

The redrive topic itself says what was sent: each of its records has the origin, and how often the record was sent back.
The command first fences earlier commands with the same `transactional.id`, then reads this topic, then sends. Progress
is kept nowhere else, so it cannot be lost or contradict the topic, and two selections may overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kconsume._kafka.topic_reader import RecordPlace
from kconsume._kafka.transactional_producer import PartitionedRecord, TransactionalProducer, TransactionFailed
from kconsume.app import App
from kconsume.cli.letter_topics import Failing, LetterTopics, failing_of, letter_in
from kconsume.cli.redrive.selection import Chosen, FoundLetter
from kconsume.errors import BrokerUnavailable, ConfigurationError, KconsumeError, SendFailed
from kconsume.failures.letter_headers import PREFIX
from kconsume.records import Partition


def letters_of(topics: LetterTopics, name: str, sent: set[Failing]) -> Iterator[FoundLetter]:
    """All letters that the topic holds.

    Args:
        sent: the failures that were sent back before (`LetterTopics.sent_to`).
    """
    for record in topics.records(name):
        if (letter := letter_in(record)) is not None:
            place = str(RecordPlace(Partition(record.topic, record.partition), record.offset))
            marks = tuple(pair for pair in record.headers if pair[0].startswith(PREFIX))
            is_sent = failing_of(letter) in sent
            yield FoundLetter(place, letter, record.timestamp, marks, is_sent=is_sent)


class TopicSender:
    """Sends the letters of a topic back to a group, and fences every earlier command that does the same."""

    def __init__(self, app: App, letters: str, group: str, partitions: Mapping[str, int]) -> None:
        """
        Args:
            letters: the topic of dead letters.
            group: the group that gets them back.
            partitions: the number of partitions of each redrive topic.
        """
        if app.kafka.get("isolation.level") == "read_uncommitted":
            raise ConfigurationError(
                "the app reads with isolation.level=read_uncommitted, so it would also read what a killed redrive has "
                "aborted: leave isolation.level out of kafka={...}"
            )
        self._letters = letters
        self._id = f"kconsume-redrive/{letters}/{group}"
        self._partitions = partitions
        self._producer = TransactionalProducer(app.declared.bootstrap_servers(), app.kafka, self._id)
        try:
            self._producer.fence()
        except TransactionFailed as failure:
            raise self._error(failure) from failure

    def send(self, chunk: Sequence[Chosen]) -> None:
        """Send a chunk back in one transaction: all of its letters, or none."""
        try:
            self._producer.send([self._record(each) for each in chunk])
        except TransactionFailed as failure:
            raise self._error(failure) from failure

    def _record(self, chosen: Chosen) -> PartitionedRecord:
        outgoing, source = chosen.outgoing, chosen.found.letter.partition.number
        # The partition number of the source, so that records keep their order.
        fits = 0 <= source < self._partitions[str(outgoing.topic)]
        return PartitionedRecord(outgoing, source if fits else None)

    def _error(self, failure: TransactionFailed) -> KconsumeError:
        what = f"the letters of {self._letters} cannot be sent back"
        match failure.kind:
            case "fenced":
                return SendFailed(
                    f"another `kconsume dlq redrive` of {self._letters} has started, so this one ends: wait for the "
                    f"other one; no letter is sent twice"
                )
            case "not_allowed":
                return ConfigurationError(
                    f"the cluster does not allow the transactional id {self._id!r}: give the principal Write and "
                    f"Describe on transactional ids that begin with 'kconsume-redrive/'"
                )
            case "queue_full":
                return SendFailed("the client's queue is full: raise queue.buffering.max.kbytes in kafka={...}")
            case "unavailable":
                return BrokerUnavailable(f"{what} ({failure.reason}): run it again; no letter is sent twice")
            case "too_large":
                return SendFailed(
                    f"{what} ({failure.step}: {failure.reason}): raise message.max.bytes in kafka={{...}}, and "
                    f"max.message.bytes of the topic; then run it again"
                )
            case _:
                return SendFailed(f"{what} ({failure.step}: {failure.reason}): run it again; no letter is sent twice")

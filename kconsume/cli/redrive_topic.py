"""Sending the dead letters of a topic back, each once, whenever and however often the command is killed.

    fence ─► what is there? ─► chunk: begin, send, commit ─► chunk …

What was sent back is known by the topic that it was sent to: each record there has its origin, and how often it was
sent back. It is read before anything is sent, and after whoever did the same before us is fenced: a producer with a
`transactional.id` waits until the transaction of its predecessor has ended, and nothing of that one is written from
then on (KIP-98). So no progress is kept anywhere else that could be lost or say something else; and it holds for any
two selections that overlap. The only producer beside those of `outlet.py`: theirs know no transactions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import cast

from confluent_kafka import KafkaError, KafkaException, Producer

from kconsume.app import App
from kconsume.cli.dlq_topic import LetterTopics, letter_in
from kconsume.cli.redrive_choice import Chosen, Failing, Found
from kconsume.cli.rehearse import Place
from kconsume.errors import BrokerUnavailable, ConfigurationError, KconsumeError, SendFailed
from kconsume.failures.letters import PREFIX, read_marks, reset_epoch_in
from kconsume.outlet import producer_settings
from kconsume.records import Headers, Partition
from kconsume.runtime.budget import Deadline
from kconsume.settings import ClientValue

_PATIENCE = 60.0
"""Seconds for one step of a transaction; the transaction of one that was killed may have to end first."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ANY_PARTITION = -1
_FENCED = (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH)
_AWAY = (KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE)


def letters_of(topics: LetterTopics, name: str, sent: set[Failing]) -> Iterator[Found]:
    """All that the topic holds, with what is known to be sent back."""
    for record in topics.records(name):
        if (letter := letter_in(record)) is not None:
            place = str(Place(Partition(record.topic, record.partition), record.offset))
            marks = tuple(pair for pair in record.headers if pair[0].startswith(PREFIX))
            is_sent = (letter.origin, letter.reset_epoch, letter.redriven + 1) in sent
            yield Found(place, letter, record.timestamp, marks, is_sent=is_sent)


def sent_to(topics: LetterTopics, names: Iterable[str]) -> set[Failing]:
    """What was sent back by these topics."""
    sent: set[Failing] = set()
    for name in names:
        for record in topics.records(name):
            marks = read_marks(record.headers)
            if marks.get("redriven", "").isdecimal():
                sent.add((marks.get("origin", ""), reset_epoch_in(marks), int(marks["redriven"])))
    return sent


class Sending:
    """The one that sends the letters of a topic back to a group. Whoever does the same is fenced by it."""

    def __init__(self, app: App, letters: str, group: str, partitions: Mapping[str, int]) -> None:
        """`partitions`: how many each topic has that is sent to."""
        if app.kafka.get("isolation.level") == "read_uncommitted":
            raise ConfigurationError(
                "the app reads with isolation.level=read_uncommitted, and would also see what a killed redrive has "
                "undone: leave it out of kafka={...}"
            )
        self._letters = letters
        self._id = f"kconsume-redrive/{letters}/{group}"
        self._partitions = partitions
        self._producer = _producer(app, self._id)
        self._try("begin", self._fence)

    def send(self, chunk: Sequence[Chosen]) -> None:
        """All of them, or none."""
        self._try("send", lambda: self._hand_over(chunk))
        self._try("commit", self._commit)

    def _fence(self) -> None:
        self._producer.init_transactions(_PATIENCE)

    def _hand_over(self, chunk: Sequence[Chosen]) -> None:
        self._producer.begin_transaction()
        for each in chunk:
            outgoing, home = each.outgoing, each.found.letter.partition.number
            topic, moment = cast(str, outgoing.topic), outgoing.timestamp
            self._producer.produce(
                topic,
                cast("bytes | None", outgoing.value),
                outgoing.key,
                # That of the source, so that what was in order there is here.
                home if 0 <= home < self._partitions[topic] else _ANY_PARTITION,
                timestamp=0 if moment is None else (moment - _EPOCH) // timedelta(milliseconds=1),
                headers=cast("list[tuple[str, str | bytes | None]]", list(cast(Headers, outgoing.headers))),
            )

    def _commit(self) -> None:
        deadline = Deadline(_PATIENCE)
        while True:
            try:
                self._producer.commit_transaction(max(1.0, deadline.left))
                return
            except KafkaException as error:
                if not error.args[0].retriable() or deadline.passed:
                    raise

    def _try(self, step: str, do: Callable[[], None]) -> None:
        try:
            do()
        except KafkaException as error:
            raise self._failed(step, error.args[0]) from error
        except BufferError as error:
            raise SendFailed("the client's queue is full: raise queue.buffering.max.kbytes in kafka={...}") from error
        except BaseException:
            if step == "send":
                self._undo()
            raise

    def _failed(self, step: str, error: KafkaError) -> KconsumeError:
        if error.code() in _FENCED:
            return SendFailed(
                f"another `kconsume dlq redrive` of {self._letters} has begun, and this one ends: what it had sent by "
                f"then is not sent again; wait for the other"
            )
        if error.code() == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
            return ConfigurationError(
                f"the cluster does not allow the transactional id {self._id!r}: give the principal Write and Describe "
                f"on transactional ids that begin with 'kconsume-redrive/'"
            )
        self._undo()
        again = "run it again: it knows what has arrived"
        if error.code() in _AWAY:
            return BrokerUnavailable(f"the letters of {self._letters} cannot be sent back ({error.str()}): {again}")
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            again = "raise message.max.bytes in kafka={...}, and max.message.bytes of the topic; then run it again"
        return SendFailed(f"the letters of {self._letters} cannot be sent back ({step}: {error.str()}): {again}")

    def _undo(self) -> None:
        """If it can be; or else the next producer does it, or the broker after a minute."""
        try:
            self._producer.abort_transaction(1.0)
        except KafkaException:
            return


def _producer(app: App, name: str) -> Producer:
    # The next one waits for a transaction that nobody ended at most as long as the broker gives it.
    ours: dict[str, ClientValue] = {"transactional.id": name, "transaction.timeout.ms": 60_000, "linger.ms": 5}
    kafka = {each: value for each, value in app.kafka.items() if each != "delivery.timeout.ms"}
    settings = {**producer_settings(app._address(), kafka), "message.timeout.ms": 30_000, **ours}
    try:
        return Producer(settings)
    except KafkaException as error:
        raise ConfigurationError(
            f"the Kafka client refused its configuration as a producer: {error.args[0].str()}; check kafka={{...}}"
        ) from None

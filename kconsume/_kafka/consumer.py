"""The Kafka consumer that is a member of the group. This file starts with the story of a rebalance.

`KafkaConsumer` wraps one `confluent_kafka.Consumer`: it subscribes, fetches, assigns at given offsets, commits and
leaves. `KafkaConsumer` must not decide which records are handled, claim partitions, or open a store: an
`AssignmentListener` (`_runtime/assignment/assignment.py`) does that inside the callbacks.

The story of a rebalance
------------------------
1. A member joins, leaves or stops sending heartbeats; partitions are added; or a subscription changes. The
   coordinator tells each member in the answer to its next heartbeat. Fetching continues.
2. `on_revoke` names the partitions that this member must give up. Under *cooperative* (KIP-429) and *consumer*
   (KIP-848) these are the partitions that move to another member, under *eager* all of them. The listener stops their
   lanes, drops records that have not started, waits for running handlers within one budget, sends the last offsets
   and calls the user's listeners. Then this file unassigns the partitions, and the client gives them up.
   - *eager*: the whole group waits for its slowest member. The budget is some seconds.
   - *cooperative*: the budget is short, because this member fetches nothing during the callback. Calling
     `incremental_unassign([])` and unassigning later would not keep the partitions: the client leaves them out of its
     next join, and another member had them half a second later although the first one had not unassigned (measured).
     The last commit is sent before that join on the same connection, so the next owner reads it.
   - *consumer*: the broker hands over the partitions, one by one, as soon as the callback returns. So the callback
     itself waits, at most one second where a fence protects the store.
   If a handler outlasts the budget, the store's fence refuses its writes. On `kafka://` its record is handled again.
3. `on_assign` names the new partitions (*eager*: all of them). The list is often empty. The listener claims them in
   the store on another thread. A claim usually takes less than half a second; then the partitions are assigned at the
   claimed offsets at once. If it takes longer, the *full* list is assigned, paused, and `start_at` starts each
   partition when its claim succeeds. Every assigned partition carries an offset: without one, the client would start
   at the offset committed in Kafka.
4. `on_lost` means that the broker has already given the partitions to other members. Nothing is committed and nothing
   waits; the store's fence refuses late writes. Under *consumer* this callback may never come: a member that the broker
   removed keeps consuming until the answer to its next heartbeat.

What the client requires (measured on confluent-kafka 2.16.1)
-------------------------------------------------------------
- One thread at a time owns the consumer and calls every method. Another thread's call would wait, possibly for ever.
- The callbacks run inside `fetch`, `poll` and `close`, on the owner thread. A callback must not wait for a thread that
  calls the consumer: that is a deadlock.
- A callback must not raise, and a signal handler must not either: the exception destroys the records that were just
  fetched, although the client has moved its position past them, and can hang `close()`. `_guarded` keeps the exception,
  and the next `fetch` raises it.
  On Python 3.11 and earlier a `KafkaException` that leaves a callback arrives as a `KafkaError`, which is not an
  exception and which `except BaseException` does not catch.
- `on_assign` must always assign. If it fails before that, the client assigns at the offsets committed in Kafka.
- `consume(n, t)` waits the whole `t` unless `n` messages come, so `fetch` uses `consume(n, 0)` and `poll(t)`.
- `pause` discards prefetched records, and `resume` may take a second. The client keeps a pause across a revoke.
- The broker checks the member of a commit and not the partition. The caller filters commits by owned partitions.
- `commit` is asynchronous and `close` is watched, because both can block without end when brokers accept connections
  and do not answer.
- Errors are judged by `code()`: `fatal()` and `retriable()` are False for commit errors and even for `_FATAL`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol, TypeVar

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from kconsume._config.client_settings import HIGHEST_LIMIT, RECEIVE_LIMIT, ClientValue, record_limit
from kconsume._config.group_protocol import GroupProtocol, protocol_of
from kconsume._kafka.client_log import client_log
from kconsume._kafka.commit_metadata import number_in
from kconsume._kafka.commit_result import CommitResult, OffsetToCommit, lasting_refusal, met_rebalance
from kconsume._kafka.fetch_wakeup import FetchWakeup
from kconsume._kafka.fetched import FetchedMessages, Runs
from kconsume._runtime.deadlines import Deadline
from kconsume.errors import ConfigurationError, KconsumeError
from kconsume.records import Partition

LEAVE_WITHIN = 1.0
"""Seconds in which a rebalance usually ends. A member that leaves during a rebalance waits that long for its end."""
_POLL_INTERVAL = 0.005
_METADATA = b"CGMDv2:"
"""The first bytes of the client's serialised group metadata. The generation follows as an int32."""

V = TypeVar("V")


class StartAt(NamedTuple):
    """Where to start reading a partition."""

    offset: int
    leader_epoch: int | None = None
    paused: bool = False


PAUSED_AT_ZERO = StartAt(0, paused=True)
"""Where a partition waits for its claim.

Not `OFFSET_BEGINNING`: the client would ask the broker for the first offset, and go there when the answer comes, even
if the partition was started elsewhere meanwhile (measured; a slow broker is enough). With a number the client asks
nothing.
"""


class AssignmentListener(Protocol):
    """Receives the partitions. Called inside the client's callbacks.

    A method must not block beyond its budget, and must not raise except for a fault that ends the consumer.
    """

    def assigned(self, partitions: list[Partition]) -> Mapping[Partition, StartAt]:
        """Return where to start each partition. A partition that is left out waits for `KafkaConsumer.start_at`."""
        ...

    def revoked(self, partitions: list[Partition]) -> None:
        """Finish these partitions, which are unassigned when this method returns."""
        ...

    def lost(self, partitions: list[Partition]) -> None:
        """Drop these partitions: other members own them already."""
        ...


class KafkaConsumer:
    """A consumer of one group.

    A consumer must be closed. When an open consumer is garbage collected, the client may block the collecting thread
    for ever: it waits for the answer to a rebalance, and no callback receives that rebalance any more.

    Args:
        settings: all properties of the client.
        listener: receives the partitions that are assigned, revoked and lost.
        batch: the number of records that `fetch` takes at most, unless the call names another.
    """

    _open = _closing = False

    def __init__(self, settings: Mapping[str, ClientValue], listener: AssignmentListener, *, batch: int = 1000) -> None:
        self.protocol = protocol_of(settings)
        self._wakeup = FetchWakeup()
        self.commit_results: list[CommitResult] = []
        """Answers to commits, oldest first. The caller removes them."""
        instance = settings.get("group.instance.id")
        self._group = settings.get("group.id")
        self._fetched = FetchedMessages(None if instance is None else str(instance), record_limit(settings))
        self._listener = listener
        self.batch = batch
        self.joins = 0
        """How many assignments the group has made."""
        self._subscribed = False
        self._topics: list[str] = []
        self._next_topics: list[str] | None = None
        """The subscription to make after the next rebalance."""
        self._static = instance is not None
        self._eager = self.protocol is GroupProtocol.EAGER
        self._positions: dict[Partition, StartAt] = {}
        """The next offset of each assigned partition. Under *eager*, one start assigns all partitions again."""
        self._late_starts: dict[Partition, StartAt] = {}
        """The start of each partition that first waited at `PAUSED_AT_ZERO`."""
        self._has_joined = self._leaving = False
        self.joined = False
        """Whether an assignment has come and the member was not removed since."""
        self._joining = Deadline(0.0)
        """Until this deadline, the broker may not have answered the join."""
        self._assigned_while_leaving: set[Partition] = set()
        """Partitions of a rebalance that ended while this member left. The listener does not know them."""
        try:
            self._consumer = Consumer(
                {
                    **settings,
                    RECEIVE_LIMIT: HIGHEST_LIMIT,
                    "error_cb": self._on_error,
                    "on_commit": self._on_commit,
                },
                logger=client_log(),
            )
        except KafkaException as error:
            raise ConfigurationError(
                f"the Kafka client refused its configuration: {error.args[0].str()}; "
                f"check the property's name and value in kafka={{...}}"
            ) from None
        self._open = True

    def __del__(self) -> None:
        if self._open and self._subscribed:
            warnings.warn(f"unclosed consumer of {self._topics}", ResourceWarning, source=self, stacklevel=1)

    # Subscription and membership

    def subscribe(self, topics: list[str]) -> None:
        """Subscribe, or change the subscription of a running consumer: topics that are left out are revoked.

        Args:
            topics: names of topics. A name that begins with ^ is a pattern.
        """
        if self._subscribed and self.protocol is GroupProtocol.COOPERATIVE:
            # The client calls `on_lost`, not `on_revoke`, for partitions outside its subscription (measured): their
            # offsets would not be committed. So the old topics stay subscribed for one rebalance.
            self._next_topics, topics = topics, sorted({*self._topics, *topics})
        self._topics = topics
        # Records of topics that are no longer subscribed may still come, so the topic of each record must be read then.
        single = not self._subscribed and len(topics) == 1 and not topics[0].startswith("^")
        self._fetched.one_topic = topics[0] if single else None
        self._fetched.named = {topic for topic in topics if not topic.startswith("^")}
        self._fetched.has_patterns = len(self._fetched.named) < len(topics)
        self._subscribed = True
        self._joining = Deadline(LEAVE_WITHIN)
        self._subscribe()

    def _subscribe(self) -> None:
        callbacks = {"on_assign": self._on_assign, "on_revoke": self._on_revoke, "on_lost": self._on_lost}
        self._consumer.subscribe(self._topics, **callbacks)

    @property
    def main_joined(self) -> bool:
        """True if the member that reads the handlers' topics has its assignment. This consumer is the only member."""
        return self.joined

    def generation(self) -> int:
        """Return the group's generation, or the member epoch under KIP-848; 0 or less while this is not a member.

        The client has no call for the generation, but its group metadata for transactions begins with the generation.
        """
        if self._closing:
            # Inside a callback of `close`, this call of the client never returns and keeps the interpreter lock
            # (measured).
            return -1
        metadata = self._consumer.consumer_group_metadata()
        if not metadata.startswith(_METADATA):
            return -1
        return int.from_bytes(metadata[len(_METADATA) : len(_METADATA) + 4], sys.byteorder, signed=True)

    def generations(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Return the generation for each of these owned partitions. Must be called inside a callback."""
        return dict.fromkeys(partitions, self.generation())

    @property
    def is_member(self) -> bool:
        """Whether the broker has admitted this member under KIP-848.

        Under KIP-848, a member that gets no partitions receives no callback (measured).
        """
        return self._subscribed and self.protocol is GroupProtocol.CONSUMER and self.generation() > 0

    def assume_joined(self) -> None:
        """Count as joined without an assignment: the broker had time to assign partitions and assigned none."""
        self.joined = True

    # Reading

    @property
    def ends(self) -> set[Partition]:
        """Partitions whose end was reached and that had no record since."""
        return self._fetched.ends

    def end_of(self, partition: Partition) -> int:
        """Return the end offset of a partition that is in `ends`."""
        return self._fetched.end_offsets[partition]

    def take_connection_errors(self) -> list[KafkaError]:
        """Return and forget what the client reported about its connections."""
        errors, self._fetched.connection_errors = self._fetched.connection_errors, []
        return errors

    @property
    def has_faults(self) -> bool:
        """Whether `take_faults` has something to return."""
        return bool(self._fetched.faults or self._fetched.topic_faults)

    def take_faults(self) -> tuple[dict[Partition, KconsumeError], dict[str, KconsumeError]]:
        """Return and forget the faults of single partitions and of whole topics.

        A partition with a fault is not fetched until `start_at`.
        """
        fetched = self._fetched
        partitions, fetched.faults = fetched.faults, {}
        topics, fetched.topic_faults = fetched.topic_faults, {}
        return partitions, topics

    def fetch(self, timeout: float, most: int | None = None) -> Runs:
        """Return the records that have arrived, by partition and in order. The client's callbacks run inside this call.

        Args:
            timeout: seconds to wait for the first record.
            most: the number of records at most; None for `batch`.
        """
        # A kept error is raised before records are taken. Raised afterwards, it would lose these records.
        self._fetched.raise_fault()
        messages = self._consumer.consume(most or self.batch, 0)
        if self._wakeup.due():
            self._wake_fetchers()
            timeout = min(timeout, self._wakeup.INTERVAL)
        if not messages:
            first = self._consumer.poll(timeout)
            messages = [] if first is None else [first]
        return self._sorted(messages)

    def poll(self) -> Runs:
        """Run the client's callbacks, and return at most one record."""
        self._fetched.raise_fault()
        message = self._consumer.poll(0)
        return [] if message is None else self._sorted([message])

    def _begin_wakeup(self) -> None:
        if not self._eager:
            self._wakeup.begin()

    def _wake_fetchers(self) -> None:
        """Send each leader a request, to wake the client's thread for it (`FetchWakeup`).

        Brokers answer in milliseconds. After a slow answer no more requests are sent. The timeout must not be short:
        the client closes the connection to a broker that misses it.
        """
        assigned = self._consumer.assignment()[: self._wakeup.MAX_PARTITIONS]
        try:
            if assigned:
                elements = [TopicPartition(each.topic, each.partition, 0) for each in assigned]
                self._consumer.offsets_for_times(elements, timeout=self._wakeup.TIMEOUT)
        except KafkaException:
            self._wakeup.end()

    def _sorted(self, messages: list[Message]) -> Runs:
        runs = self._fetched.sort(messages)
        if self._fetched.wait_offset_missing:
            self._start_again(self._fetched.wait_offset_missing)
        return self._without_repeats(runs)

    def _start_again(self, partitions: set[Partition]) -> None:
        """Start partitions again if their fetch at `PAUSED_AT_ZERO` was answered late.

        The fetch was on its way when the partition was paused, and the log begins at a later offset. The client stops
        reading a partition after such an answer.
        """
        starts = {p: start for p in partitions if (start := self._late_starts.get(p)) is not None}
        partitions.clear()
        if starts:
            self.start_at(starts)
            self._fetched.waited.difference_update(starts)  # once: a second such answer is a real fault

    def _without_repeats(self, runs: Runs) -> Runs:
        """Return the runs without records that came before.

        During a rebalance the client pauses the partitions that stay, on its own thread, and then continues after the
        last record that it saw this consumer take. A record that is on its way at that moment may come twice.
        """
        new: Runs = []
        for partition, run in runs:
            position = self._positions.get(partition)
            if position is not None and run[0].offset() < position.offset:
                run = [message for message in run if message.offset() >= position.offset]
            if run:
                new.append((partition, run))
                if position is not None:
                    self._positions[partition] = StartAt(run[-1].offset() + 1, run[-1].leader_epoch())
        return new

    # Partitions

    def by_member(self, values: Mapping[Partition, V]) -> list[tuple[KafkaConsumer, Mapping[Partition, V]]]:
        """Return the values by the group member that owns their partitions. A `SplitConsumer` has two members."""
        return [(self, values)]

    def start_at(self, starts: Mapping[Partition, StartAt]) -> None:
        """Start assigned partitions at these offsets, or restart them there."""
        self._late_starts.update((p, start) for p, start in starts.items() if p in self._fetched.waited)
        if not self._eager:
            self._consumer.incremental_unassign([TopicPartition(*p) for p in starts])
        self._start(starts)
        self.ends.difference_update(starts)

    def assign_explicitly(self, starts: Mapping[Partition, StartAt]) -> None:
        """Assign partitions of one topic without the coordination of a group."""
        self.joined = True
        self._fetched.one_topic = next(iter(starts)).topic
        self._start(starts)
        self._fetched.waited.update(p for p, start in starts.items() if start == PAUSED_AT_ZERO)

    def _start(self, starts: Mapping[Partition, StartAt]) -> None:
        self._fetched.forget(starts)
        self._positions.update(starts)
        if self._eager:
            self._consumer.assign([_element(p, start) for p, start in self._positions.items()])
        else:
            self._consumer.incremental_assign([_element(p, start) for p, start in starts.items()])
        # The client keeps a pause across a revoke, so partitions that are not paused are resumed.
        self.pause(p for p, start in starts.items() if start.paused)
        self.resume(p for p, start in starts.items() if not start.paused)

    def _unassign(self, elements: list[TopicPartition]) -> None:
        self._fetched.forget(Partition(element.topic, element.partition) for element in elements)
        for element in elements:
            partition = Partition(element.topic, element.partition)
            self._fetched.waited.discard(partition)
            self._late_starts.pop(partition, None)
            self._positions.pop(partition, None)
        if self._eager:
            self._positions.clear()
            self._consumer.unassign()
        else:
            self._consumer.incremental_unassign(elements)

    def pause(self, partitions: Iterable[Partition]) -> None:
        """Stop fetching these partitions. The client discards their prefetched records (librdkafka issue 5343)."""
        self._consumer.pause([TopicPartition(*p) for p in partitions])

    def resume(self, partitions: Iterable[Partition]) -> None:
        """Fetch these partitions again."""
        self._consumer.resume([TopicPartition(*p) for p in partitions])

    # Commits

    def commit(self, offsets: Mapping[Partition, OffsetToCommit]) -> None:
        """Send offsets to the group, without waiting. The answer is appended to `commit_results`."""
        elements = [
            TopicPartition(p.topic, p.number, each.offset, each.metadata, *_epoch(each.leader_epoch))
            for p, each in offsets.items()
        ]
        try:
            self._consumer.commit(offsets=elements, asynchronous=True)
        except KafkaException as error:
            number = max((number_in(each.metadata) for each in offsets.values()), default=0)
            sent = {p: each.offset for p, each in offsets.items()}
            self._note_commit(sent, dict.fromkeys(offsets, error.args[0]), number)

    def _note_commit(self, offsets: dict[Partition, int], refused: Mapping[Partition, KafkaError], number: int) -> None:
        text = next((error.str() for error in refused.values()), None)
        refusals = (
            lasting_refusal(error, group=self._group, subscribed=self._subscribed, fetched=self._fetched)
            for error in refused.values()
        )
        refusal = next((each for each in refusals if each is not None), None)
        faults = {p: self._fetched.not_authorized(p, error) for p, error in refused.items()}
        generation = self.generation()
        result = CommitResult(offsets, text, refusal, faults, generation, number, met_rebalance(refused))
        self.commit_results.append(result)

    # Leaving

    def close(self, patience: float = LEAVE_WITHIN) -> None:
        """Leave the group and close the client.

        This call may hang when brokers accept connections and do not answer, so the caller must watch the time.

        Args:
            patience: seconds that leaving may take.
        """
        try:
            if self._subscribed and not self._static:  # a static member returns, so it does not leave
                self._leave(Deadline(min(patience, LEAVE_WITHIN)))
        except KafkaException as error:
            if error.args[0].code() != KafkaError._FATAL:
                raise
            # A client that gave up cannot leave its group, but must still be closed. The reason is kept.
        finally:
            self._closing = True
            self._consumer.close()
            self._open = False
        self._fetched.raise_fault()

    def _leave(self, deadline: Deadline) -> None:
        """Tell the group that this member leaves.

        A client that is closed in the middle of a rebalance sends no LeaveGroup, and the group waits for the end of its
        session. Unsubscribing alone is not enough: the client sends LeaveGroup only after the rebalance, and closing
        does not wait for that. Of 200 members that only unsubscribed, 12 sent no LeaveGroup. All of 300 members that
        were polled until it was sent did (measured).
        """
        self._leaving = True
        if self.protocol is GroupProtocol.CONSUMER:
            # A member whose join is not answered yet sends no leave, and its member id stays in the group for ever.
            self._poll_until(lambda: self._has_joined or self._joining.passed, deadline)
        self._consumer.unsubscribe()
        if self.protocol is not GroupProtocol.CONSUMER:
            self._poll_until(lambda: not self._consumer.memberid(), deadline)

    def _poll_until(self, done: Callable[[], bool], deadline: Deadline) -> None:
        while not done() and not deadline.passed:
            # Drops a record: its offset is not committed, so the next owner reads it.
            self._consumer.poll(_POLL_INTERVAL)

    # Callbacks

    def _on_assign(self, _: Consumer, elements: list[TopicPartition]) -> None:
        self._guarded(self._assign, elements)
        self._begin_wakeup()

    def _on_revoke(self, _: Consumer, elements: list[TopicPartition]) -> None:
        self._guarded(self._give_up, self._listener.revoked, elements)

    def _on_lost(self, _: Consumer, elements: list[TopicPartition]) -> None:
        self.joined = False  # else a consumer without partitions would count as one that has read everything
        self._guarded(self._give_up, self._listener.lost, elements)

    def _assign(self, elements: list[TopicPartition]) -> None:
        partitions = [Partition(e.topic, e.partition) for e in elements]
        starts: Mapping[Partition, StartAt] = {}
        self._has_joined = self.joined = True
        self.joins += 1
        try:
            if self._leaving:
                self._assigned_while_leaving.update(partitions)
            else:
                starts = self._listener.assigned(partitions)
        finally:
            # The full list is assigned also after an error. For partitions that are left out, the client would
            # start at the offsets committed in Kafka.
            self._start({p: starts.get(p, PAUSED_AT_ZERO) for p in partitions})
            self._fetched.waited.update(p for p in partitions if p not in starts)
        if self._next_topics is not None:
            self._topics, self._next_topics = self._next_topics, None
            self._subscribe()

    def _give_up(self, finish: Callable[[list[Partition]], None], elements: list[TopicPartition]) -> None:
        partitions = [Partition(e.topic, e.partition) for e in elements]
        self.ends.difference_update(partitions)
        try:
            finish([partition for partition in partitions if partition not in self._assigned_while_leaving])
        finally:
            self._unassign(elements)
            self._begin_wakeup()

    def _on_commit(self, error: KafkaError | None, elements: list[TopicPartition]) -> None:
        self._guarded(self._committed, error, elements)

    def _committed(self, error: KafkaError | None, elements: list[TopicPartition]) -> None:
        offsets = {Partition(e.topic, e.partition): e.offset for e in elements}
        # The offsets of other topics are accepted when one topic was deleted or may not be read.
        refused = {Partition(e.topic, e.partition): e.error for e in elements if e.error is not None}
        number = max((number_in(e.metadata or "") for e in elements), default=0)
        self._note_commit(offsets, refused if error is None else dict.fromkeys(offsets, error), number)

    def _on_error(self, error: KafkaError) -> None:
        self._fetched.connection_errors.append(error)

    def _guarded(self, step: Callable[..., None], *arguments: object) -> None:
        """Run the body of a callback. An exception is kept for the next `fetch` and does not reach librdkafka."""
        try:
            step(*arguments)
        except BaseException as error:  # noqa: BLE001  (kept, raised by the next fetch)
            self._fetched.keep_fault(error)


def _element(partition: Partition, start: StartAt) -> TopicPartition:
    # If the log was truncated, a broker that gets the leader epoch reports it and serves no other records (KIP-320).
    return TopicPartition(partition.topic, partition.number, start.offset, "", *_epoch(start.leader_epoch))


def _epoch(leader_epoch: int | None) -> tuple[int, ...]:
    return () if leader_epoch is None else (leader_epoch,)

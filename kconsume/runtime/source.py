"""The Kafka consumer: the only file that touches `confluent_kafka.Consumer`.

One thread at a time has a `Source`; every method is called on it. The client's callbacks run inside `fetch` and
`close`, on that same thread, and are total: nothing escapes into librdkafka, where an exception destroys the
records in hand and can hang `close()`. What goes wrong in one is parked and raised by the next `fetch`.

The story of a rebalance
------------------------
1. A member joins, leaves or is not heard of any more; partitions are added; a subscription changes. The coordinator
   tells everybody at their next heartbeat. Nothing stops.
2. `on_revoke` names what we have to give up: under *cooperative* (KIP-429) and *consumer* (KIP-848) what moves away,
   under *eager* everything. The tenant (`runtime/tenancy.py`) stops those lanes, drops what has not started, gives
   the handlers that run their share of one budget, sends the last offsets, tells the listeners. Then they are
   unassigned, and with that the client lets go of them.
   - Under *eager* the whole group waits for the slowest member, so the budget is seconds.
   - Under *cooperative* it is short, because nothing is fetched meanwhile. Answering `incremental_unassign([])` and
     unassigning later would not hold the partitions back: the client leaves them out of its next join all the same,
     and another member had them half a second later while the first had not unassigned (measured). The last
     commit is ahead of that join on the same connection, so the next owner reads it.
   - Under *consumer* the partitions are handed over, one by one, when the callback returns; so it waits itself, a
     second at most where a fence guards the store.
   A handler that outlasts the budget is what the fence is for; with `kafka://` its record is repeated.
3. `on_assign` names what is new (*eager*: everything), often nothing. The tenant claims it in the store, off this
   thread. Usually that is done within half a second and the partitions are assigned at the claimed offsets at once.
   If it is slower, the *full* list is assigned, paused, and `place` starts each partition when its claim is in.
   Offsets are always passed: an element without one would start at the offset committed in Kafka (rule 5).
4. `on_lost` means that the broker has given the partitions away already: no commit, no waiting. The fence of the
   store keeps late writes out. Under *consumer* it may never come: a member that the broker has put out goes on
   until its next heartbeat is answered.
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

from kconsume.errors import ConfigurationError, GroupRefused, KconsumeError
from kconsume.protocols import GroupProtocol, protocol_of
from kconsume.records import Partition
from kconsume.runtime.arrivals import Arrivals, Runs
from kconsume.runtime.budget import Deadline
from kconsume.runtime.client_log import client_log
from kconsume.runtime.nudges import Nudges
from kconsume.settings import HIGHEST_LIMIT, RECEIVE_LIMIT, ClientValue, record_limit

LEAVE_WITHIN = 1.0
"""Seconds in which a rebalance usually ends: so long a member that leaves waits for it."""
_MOMENT = 0.005
_METADATA = b"CGMDv2:"
"""How the client's serialised group metadata begins; an int32 follows, the generation."""

V = TypeVar("V")

# A commit that met a rebalance or a moved coordinator: said again with the next one, if still owned.
_COMMIT_AGAIN = {
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError._WAIT_COORD,
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError.STALE_MEMBER_EPOCH,
}
# The broker does not know us (any more); the client's own callbacks follow.
_COMMIT_DISOWNED = {
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.FENCED_MEMBER_EPOCH,
    KafkaError._NO_OFFSET,
    KafkaError._ASSIGNMENT_LOST,
}

# To one who is in no group: it has members by now, and takes offsets from nobody else.
_NO_MEMBER = {KafkaError.ILLEGAL_GENERATION, KafkaError.UNKNOWN_MEMBER_ID}


# What the broker says of a commit that was on its way while the group rebalanced. It answers so to every member that
# works on meanwhile, until the member knows of the new generation, and nobody can tell from here that it has begun.
_MET_A_REBALANCE = {
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.STALE_MEMBER_EPOCH,
}


class Place(NamedTuple):
    """Where to start reading a partition."""

    offset: int
    leader_epoch: int | None = None
    paused: bool = False


# Not at the beginning: the client would ask the broker where that is, and go there when the answer comes, though it has
# been placed elsewhere since (measured; a slow broker is enough). Paused at a number, it asks nothing.
NOWHERE = Place(0, paused=True)


class Mark(NamedTuple):
    """An offset to commit."""

    offset: int
    leader_epoch: int | None
    metadata: str


class CommitResult(NamedTuple):
    """The broker's answer to a commit. Where it accepted an offset, it has confirmed our membership."""

    offsets: dict[Partition, int]
    error: str | None
    refusal: KconsumeError | None = None
    """Why the same commit would not be taken later either."""
    refused: Mapping[Partition, KconsumeError | None] = {}
    """Those whose offset was not accepted, and what is wrong with them alone, if that is it."""
    generation: int = -1
    """Of the group, when the answer came."""
    met_rebalance: bool = False
    """Whether it was refused for a rebalance alone: the next one goes out under the new generation."""


class Tenant(Protocol):
    """Who lives in the partitions. Called inside the client's callbacks; must not raise for a reason that is not a
    fault, and must not block beyond its budget."""

    def assigned(self, partitions: list[Partition]) -> Mapping[Partition, Place]:
        """Where to start each; one that is left out is assigned paused, until `Source.place`."""
        ...

    def revoked(self, partitions: list[Partition]) -> None:
        """Finish with them: when this returns, they are unassigned."""
        ...

    def lost(self, partitions: list[Partition]) -> None:
        """They belong to others already."""
        ...


class Source:
    """A consumer of one group. Must be closed: when one that was not is collected, the client may wait for ever for an
    answer to a rebalance that nobody hears of any more, on whatever thread that happens."""

    _open = _closes = False

    def __init__(self, settings: Mapping[str, ClientValue], tenant: Tenant, *, batch: int = 1000) -> None:
        self.protocol = protocol_of(settings)
        self._nudges = Nudges()
        self.commit_results: list[CommitResult] = []
        instance = settings.get("group.instance.id")
        self._group = settings.get("group.id")
        self._arrivals = Arrivals(None if instance is None else str(instance), record_limit(settings))
        self._tenant = tenant
        self.batch = batch
        """How many records are fetched at once, unless it is said."""
        self.joins = 0
        """How many assignments the group has given us."""
        self._subscribed = False
        self._topics: list[str] = []
        self._next_topics: list[str] | None = None
        """What is to be subscribed to after the rebalance that is on its way."""
        self._static = instance is not None
        self._eager = self.protocol is GroupProtocol.EAGER
        self._places: dict[Partition, Place] = {}
        """Where every assigned partition goes on. Under *eager*, to place one of them all are assigned anew."""
        self._late: dict[Partition, Place] = {}
        """Where partitions were placed that waited nowhere first."""
        self._has_joined = self._leaves = False
        self.joined = False
        """Whether we have been told what is ours, and were not put out since."""
        self._joining = Deadline(0.0)
        """Until when it may be that the broker has not answered yet."""
        self._declined: set[Partition] = set()
        """Assigned by a rebalance that ended while we left: the tenant has not heard of them."""
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

    # Reading

    def subscribe(self, topics: list[str]) -> None:
        """Also while it runs: what is no longer wanted is revoked. A name that begins with ^ is a pattern."""
        if self._subscribed and self.protocol is GroupProtocol.COOPERATIVE:
            # What is not in its subscription the client calls lost, not revoked (measured): nothing of it would be
            # committed. With the old topics beside the new ones first, it gives them up in order.
            self._next_topics, topics = topics, sorted({*self._topics, *topics})
        self._topics = topics
        # Records of a topic that is no longer wanted may still come: then they are told apart by their topic.
        single = not self._subscribed and len(topics) == 1 and not topics[0].startswith("^")
        self._arrivals.one_topic = topics[0] if single else None
        self._arrivals.named = {topic for topic in topics if not topic.startswith("^")}
        self._arrivals.has_patterns = len(self._arrivals.named) < len(topics)
        self._subscribed = True
        self._joining = Deadline(LEAVE_WITHIN)
        self._subscribe()

    def _subscribe(self) -> None:
        callbacks = {"on_assign": self._on_assign, "on_revoke": self._on_revoke, "on_lost": self._on_lost}
        self._consumer.subscribe(self._topics, **callbacks)

    @property
    def ends(self) -> set[Partition]:
        """Partitions whose end was reached, and of which nothing came since."""
        return self._arrivals.ends

    def end_of(self, partition: Partition) -> int:
        """Where a partition ends that is in `ends`."""
        return self._arrivals.end_offsets[partition]

    def generation(self) -> int:
        """The group's generation, or our member epoch under KIP-848; not above 0 while we are no member. The client
        has no call for it; the group metadata that it makes for transactions begins with it.

        While the client is closed it must not be asked: in a callback of that moment the question is never answered,
        and waits with the interpreter's lock (measured)."""
        if self._closes:
            return -1
        metadata = self._consumer.consumer_group_metadata()
        if not metadata.startswith(_METADATA):
            return -1
        return int.from_bytes(metadata[len(_METADATA) : len(_METADATA) + 4], sys.byteorder, signed=True)

    def generations(self, partitions: Iterable[Partition]) -> dict[Partition, int]:
        """Of partitions that are ours, the generation; for calls inside a callback."""
        return dict.fromkeys(partitions, self.generation())

    @property
    def is_member(self) -> bool:
        """Whether the broker has admitted us under KIP-848, where a member that is assigned nothing is not told so
        (measured: no callback comes)."""
        return self._subscribed and self.protocol is GroupProtocol.CONSUMER and self.generation() > 0

    def admitted(self) -> None:
        """The broker has had time enough to assign us something: we have nothing, and will be told of what comes."""
        self.joined = True

    def take_trouble(self) -> list[KafkaError]:
        """What the client said of its connections since this was last asked."""
        trouble, self._arrivals.trouble = self._arrivals.trouble, []
        return trouble

    @property
    def has_faults(self) -> bool:
        return bool(self._arrivals.faults or self._arrivals.topic_faults)

    def take_faults(self) -> tuple[dict[Partition, KconsumeError], dict[str, KconsumeError]]:
        """What went wrong with single partitions and with whole topics since this was last asked. Nothing of those
        partitions is fetched until they are placed again."""
        arrivals = self._arrivals
        partitions, arrivals.faults = arrivals.faults, {}
        topics, arrivals.topic_faults = arrivals.topic_faults, {}
        return partitions, topics

    def fetch(self, timeout: float, most: int | None = None) -> Runs:
        """Records that are there, by partition and in order; waits for the first up to `timeout`."""
        # Before anything is taken: raised afterwards, a fault would take the records in hand with it.
        self._arrivals.raise_fault()
        # consume(n, t) would wait the whole t for n messages, so it only ever takes what is there.
        messages = self._consumer.consume(most or self.batch, 0)
        if self._nudges.due():
            self._nudge()
            timeout = min(timeout, self._nudges.EVERY)
        if not messages:
            first = self._consumer.poll(timeout)
            messages = [] if first is None else [first]
        return self._sorted(messages)

    def _wake(self) -> None:
        if not self._eager:
            self._nudges.begin()

    def _nudge(self) -> None:
        """Ask the leaders something that nobody wants to know (`nudges.py`). Answered in a moment; a broker that takes
        longer is not asked again. Never with a short timeout: the client hangs up on a broker that misses one."""
        assigned = self._consumer.assignment()[: self._nudges.ENOUGH]
        try:
            if assigned:
                elements = [TopicPartition(each.topic, each.partition, 0) for each in assigned]
                self._consumer.offsets_for_times(elements, timeout=self._nudges.PATIENCE)
        except KafkaException:
            self._nudges.end()

    def poll(self) -> Runs:
        """Serve the client's callbacks and take at most one record."""
        self._arrivals.raise_fault()
        message = self._consumer.poll(0)
        return [] if message is None else self._sorted([message])

    def _sorted(self, messages: list[Message]) -> Runs:
        runs = self._arrivals.sort(messages)
        if self._arrivals.astray:
            self._place_again(self._arrivals.astray)
        return self._fresh(runs)

    def _place_again(self, astray: set[Partition]) -> None:
        """A fetch from nowhere was on its way when the partition was paused, and its log begins later: by that answer
        the client has stopped reading there."""
        places = {p: place for p in astray if (place := self._late.get(p)) is not None}
        astray.clear()
        if places:
            self.place(places)
            self._arrivals.unproven.difference_update(places)  # once: should it be so again, then it is true

    def _fresh(self, runs: Runs) -> Runs:
        """Without records that came before. For a rebalance the client pauses what we keep, on a thread of its own, and
        reads on behind the last record that it saw us take: one that is on its way to us then may come again."""
        fresh: Runs = []
        for partition, run in runs:
            place = self._places.get(partition)
            if place is not None and run[0].offset() < place.offset:
                run = [message for message in run if message.offset() >= place.offset]
            if run:
                fresh.append((partition, run))
                if place is not None:
                    self._places[partition] = Place(run[-1].offset() + 1, run[-1].leader_epoch())
        return fresh

    # Partitions

    def parts(self, wanted: Mapping[Partition, V]) -> list[tuple[Source, Mapping[Partition, V]]]:
        """What of it is ours: all, for there is one member (two of a `SplitSource`)."""
        return [(self, wanted)]

    def place(self, places: Mapping[Partition, Place]) -> None:
        """Start (or restart) assigned partitions at these places."""
        self._late.update((p, place) for p, place in places.items() if p in self._arrivals.unproven)
        if not self._eager:
            self._consumer.incremental_unassign([TopicPartition(*p) for p in places])
        self._start(places)
        self.ends.difference_update(places)

    def take(self, places: Mapping[Partition, Place]) -> None:
        """Assign partitions without a group's coordination."""
        self.joined = True
        self._arrivals.one_topic = next(iter(places)).topic
        self._start(places)
        self._arrivals.unproven.update(p for p, place in places.items() if place == NOWHERE)

    def _start(self, places: Mapping[Partition, Place]) -> None:
        self._arrivals.forget(places)
        self._places.update(places)
        if self._eager:
            self._consumer.assign([_element(p, place) for p, place in self._places.items()])
        else:
            self._consumer.incremental_assign([_element(p, place) for p, place in places.items()])
        # A pause outlives a revoke on the same consumer (rule 10), so both lists are said.
        self.pause(p for p, place in places.items() if place.paused)
        self.resume(p for p, place in places.items() if not place.paused)

    def _let_go(self, elements: list[TopicPartition]) -> None:
        self._arrivals.forget(Partition(element.topic, element.partition) for element in elements)
        for element in elements:
            partition = Partition(element.topic, element.partition)
            self._arrivals.unproven.discard(partition)
            self._late.pop(partition, None)
            self._places.pop(partition, None)
        if self._eager:
            self._places.clear()
            self._consumer.unassign()
        else:
            self._consumer.incremental_unassign(elements)

    def pause(self, partitions: Iterable[Partition]) -> None:
        """Stop fetching. Discards what the client has prefetched of them (librdkafka issue 5343)."""
        self._consumer.pause([TopicPartition(*p) for p in partitions])

    def resume(self, partitions: Iterable[Partition]) -> None:
        self._consumer.resume([TopicPartition(*p) for p in partitions])

    def commit(self, marks: Mapping[Partition, Mark]) -> None:
        """Send offsets to the group; the answer comes to `commit_results`. Never waits (rule 14)."""
        elements = [
            TopicPartition(p.topic, p.number, m.offset, m.metadata, *_epoch(m.leader_epoch)) for p, m in marks.items()
        ]
        try:
            self._consumer.commit(offsets=elements, asynchronous=True)
        except KafkaException as error:
            self._note_commit({p: mark.offset for p, mark in marks.items()}, dict.fromkeys(marks, error.args[0]))

    def close(self, patience: float = LEAVE_WITHIN) -> None:
        """Leave the group. May hang when brokers accept connections and do not answer: watch it."""
        try:
            if self._subscribed and not self._static:  # a static member must not be heard: it will be back
                self._leave(Deadline(min(patience, LEAVE_WITHIN)))
        except KafkaException as error:
            if error.args[0].code() != KafkaError._FATAL:
                raise
            # A client that has died cannot leave its group, and must be closed all the same. Why it died is parked.
        finally:
            self._closes = True
            self._consumer.close()
            self._open = False
        self._arrivals.raise_fault()

    def _leave(self, deadline: Deadline) -> None:
        """Closed in the middle of a rebalance, the client goes without a word, and the group waits for its session to
        end. Unsubscribing alone does not help: the client puts that off to the end of the rebalance, and closing does
        not wait for it (12 of 200 were never heard to leave, and none of 300 that were polled until they had)."""
        self._leaves = True
        if self.protocol is GroupProtocol.CONSUMER:
            # A member that the broker has not answered yet does not tell it that it leaves; its id it has for ever.
            self._poll_until(lambda: self._has_joined or self._joining.passed, deadline)
        self._consumer.unsubscribe()
        if self.protocol is not GroupProtocol.CONSUMER:
            self._poll_until(lambda: not self._consumer.memberid(), deadline)

    def _poll_until(self, done: Callable[[], bool], deadline: Deadline) -> None:
        while not done() and not deadline.passed:
            self._consumer.poll(_MOMENT)  # what comes is not ours any more, and nobody has passed it

    # Callbacks

    def _on_assign(self, _: Consumer, elements: list[TopicPartition]) -> None:
        self._total(self._assign, elements)
        self._wake()

    def _on_revoke(self, _: Consumer, elements: list[TopicPartition]) -> None:
        self._total(self._give_up, self._tenant.revoked, elements)

    def _on_lost(self, _: Consumer, elements: list[TopicPartition]) -> None:
        self.joined = False  # or having nothing would be taken for having read everything
        self._total(self._give_up, self._tenant.lost, elements)

    def _assign(self, elements: list[TopicPartition]) -> None:
        partitions = [Partition(e.topic, e.partition) for e in elements]
        places: Mapping[Partition, Place] = {}
        self._has_joined = self.joined = True
        self.joins += 1
        try:
            if self._leaves:
                self._declined.update(partitions)
            else:
                places = self._tenant.assigned(partitions)
        finally:
            # Whatever happened, the full list is assigned: a subset, or none, would leave it to the client
            # to start at offsets that are not ours.
            self._start({p: places.get(p, NOWHERE) for p in partitions})
            self._arrivals.unproven.update(p for p in partitions if p not in places)
        if self._next_topics is not None:
            self._topics, self._next_topics = self._next_topics, None
            self._subscribe()

    def _give_up(self, finish: Callable[[list[Partition]], None], elements: list[TopicPartition]) -> None:
        partitions = [Partition(e.topic, e.partition) for e in elements]
        self.ends.difference_update(partitions)
        try:
            finish([partition for partition in partitions if partition not in self._declined])
        finally:
            self._let_go(elements)
            self._wake()

    def _on_commit(self, error: KafkaError | None, elements: list[TopicPartition]) -> None:
        self._total(self._committed, error, elements)

    def _committed(self, error: KafkaError | None, elements: list[TopicPartition]) -> None:
        offsets = {Partition(e.topic, e.partition): e.offset for e in elements}
        # One topic that is gone, or not allowed, does not keep the offsets of the others from being accepted.
        refused = {Partition(e.topic, e.partition): e.error for e in elements if e.error is not None}
        self._note_commit(offsets, refused if error is None else dict.fromkeys(offsets, error))

    def _note_commit(self, offsets: dict[Partition, int], refused: Mapping[Partition, KafkaError]) -> None:
        said = next((error.str() for error in refused.values()), None)
        refusal = next((why for error in refused.values() if (why := self._refusal(error)) is not None), None)
        faults = {p: self._arrivals.not_authorized(p, error) for p, error in refused.items()}
        met_rebalance = bool(refused) and all(error.code() in _MET_A_REBALANCE for error in refused.values())
        self.commit_results.append(CommitResult(offsets, said, refusal, faults, self.generation(), met_rebalance))

    def _refusal(self, error: KafkaError) -> KconsumeError | None:
        if not self._subscribed and error.code() in _NO_MEMBER:
            return GroupRefused(
                f"group {self._group!r} has members by now, who share its partitions, and takes no more offsets from "
                f"a handler with partitions= ({error.str()}); what it handled since its last commit is handled again: "
                f"give this handler a group= of its own, or stop the others and start it again"
            )
        if error.code() in _COMMIT_AGAIN or error.code() in _COMMIT_DISOWNED:
            return None
        if error.code() in (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.UNKNOWN_TOPIC_OR_PART):
            return None  # the topic has gone, or may no longer be read: that holds its partitions, and no others
        if error.code() == KafkaError._FATAL:
            return self._arrivals.death  # the client is dead, and may not have said yet why
        return self._arrivals.refusal(error, "the broker refused the offset commit")

    def _on_error(self, error: KafkaError) -> None:
        self._arrivals.trouble.append(error)

    def _total(self, step: Callable[..., None], *arguments: object) -> None:
        """Run a callback's body so that nothing escapes into librdkafka (rules 3 and 16)."""
        try:
            step(*arguments)
        except BaseException as error:  # noqa: BLE001  (parked, raised by the next fetch)
            self._arrivals.park(error)


def _element(partition: Partition, place: Place) -> TopicPartition:
    # The leader epoch lets the broker report a truncated log instead of serving other records (KIP-320).
    return TopicPartition(partition.topic, partition.number, place.offset, "", *_epoch(place.leader_epoch))


def _epoch(leader_epoch: int | None) -> tuple[int, ...]:
    return () if leader_epoch is None else (leader_epoch,)

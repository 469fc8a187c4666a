"""Derives findings from facts about an app: problems of its configuration, and facts that a user should know.

`cli/check/command.py` gathers the facts and prints the findings. An *error*
means that the app cannot work, a *warning* that it works but will cause harm. A *note* is a fact to know once. Each
finding has a fix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from kconsume._config.group_protocol import STRATEGY, ClientValue, GroupProtocol, protocol_of
from kconsume._runtime.assignment.partition_trouble import NOT_SKIPPED, code_of, out_of_range, recreated
from kconsume._runtime.deadlines import DRAIN_SHARE
from kconsume.backends.base import Position
from kconsume.errors import OffsetError
from kconsume.records import Partition

Level = Literal["error", "warning", "note"]

LEVELS: Sequence[Level] = ("error", "warning", "note")

EMBEDDED = "embedded://"

KUBERNETES_GRACE = 30.0
"""`terminationGracePeriodSeconds` of a pod by default."""
SHORTEST_SHUTDOWN = 5.0
"""Seconds. With less, handlers get little time, because the last commit and leaving the group need time too."""
SHORTEST_SESSION = 6000
"""`group.min.session.timeout.ms` of a broker by default."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that the user should know. `code` does not change between versions; the texts may."""

    level: Level
    code: str
    about: str
    problem: str
    fix: str


class Budgets(msgspec.Struct, frozen=True):
    """The time and memory limits of the app."""

    shutdown: float
    memory: int


class Handler(msgspec.Struct, frozen=True):
    """A handler as it will run."""

    name: str
    topics: tuple[str, ...]
    group: str
    store: str
    """The address of the store, without a password."""
    gets: str = "bytes"
    """The type of the first parameter."""
    transaction: str | None = None
    """The type of the parameter that gets the store's transaction."""
    transactional_store: bool = False
    guarantee: str = ""
    own_guarantee: bool = False
    """True if the handler declares its guarantee itself, with any store."""
    on_error: str = ""
    start: str = "earliest"
    order: str = "partition"
    executor: str = "thread"
    concurrency: int | None = None
    workers: int = 8
    """The highest number of records handled at once; it depends on `concurrency` and the store."""
    chunk: int | None = None
    batch: str | None = None
    """The limits of a batch, if the handler takes batches."""
    rate: str | None = None
    timeout: float | None = None
    resources: tuple[str, ...] = ()
    """The types of the handler's resources."""
    sends: bool = False
    sending: str = ""
    """The guarantee for records that the handler sends."""
    to: str | None = None
    """The topic to which the handler's return values are sent."""
    partitions: tuple[int, ...] | None = None
    pattern: str | None = None
    """The pattern of the handler's topics, if the handler does not name them."""
    store_trouble: str | None = None
    """Why the store cannot be used, and the fix, if that is known without asking a server."""

    @property
    def scheme(self) -> str:
        return self.store.partition("://")[0]


class ClientFacts(msgspec.Struct, frozen=True):
    """The messages of the Kafka client about its configuration."""

    refused: str | None = None
    warnings: tuple[str, ...] = ()


class ClusterFacts(msgspec.Struct, frozen=True):
    """The answers of the cluster. `topics` is None if the cluster was not asked, or did not answer. Otherwise `topics`
    has the number of partitions of each topic, None for a missing topic."""

    topics: Mapping[str, int | None] | None = None
    unreachable: str | None = None
    missing: Mapping[str, str] = {}
    """For each missing topic, the text of the error that `Cluster` raised."""
    makes_topics: bool = False
    """True if a producer creates a topic by naming it (the embedded broker)."""
    assignors: Mapping[str, str] = {}
    """For each group that has classic members: the assignor that these members use."""


class Stored(NamedTuple):
    """A stored offset, and the state of its log."""

    group: str
    partition: Partition
    position: Position
    topic_id: str | None
    """The current id of the topic; None if the cluster does not report it."""
    first: int
    """The first offset in the log."""
    end: int
    """The offset after the last one in the log."""


def of_app(brokers: str, handlers: Sequence[Handler], *, running: bool = True) -> Iterator[Finding]:
    """Findings about an app without handlers, and about an embedded broker.

    Args:
        running: False if the embedded broker is not running.
    """
    if not handlers:
        yield Finding(
            "error", "no-handler", "app",
            "the app has no handler, so there is nothing to run",
            "decorate a function with @app.consume('topic'), in the app's module or one that it imports",
        )  # fmt: skip
    name = brokers.removeprefix(EMBEDDED)
    if brokers == EMBEDDED:
        yield Finding(
            "note", "broker-inside", "brokers",
            "embedded:// is a broker inside the app's own process: it starts empty, and no other process can use it",
            "to share a broker between processes, name it: App('embedded://shop', ...)",
        )  # fmt: skip
    elif name != brokers and not running:
        yield Finding(
            "note", "broker-not-running", "brokers",
            f"the embedded broker {name!r} is not running; the first program that uses it starts it, without topics",
            f"start it with its topics: kconsume broker {name} --topic orders:4",
        )  # fmt: skip


def of_environment(unknown: Sequence[str]) -> Iterator[Finding]:
    """Environment variables that kconsume does not know.

    Args:
        unknown: for each one a sentence, with the name that was probably meant.
    """
    for sentence in unknown:
        problem, _, fix = sentence.partition(": ")
        yield Finding("warning", "unknown-variable", "environment", problem, fix or "remove it, or correct its name")


def of_client(facts: ClientFacts) -> Iterator[Finding]:
    """Properties that the client refuses or ignores."""
    refused = facts.refused
    # `of_budgets` also reports a session timeout above the poll interval, with a better text.
    if refused is not None and not ("max.poll.interval.ms" in refused and "session.timeout.ms" in refused):
        yield Finding(
            "error", "client-refuses", "kafka={...}",
            f"the Kafka client refuses this configuration: {refused}",
            "correct the name or the value of that property in App(kafka={...})",
        )  # fmt: skip
    for warning in facts.warnings:
        yield Finding(
            "warning", "client-ignores", "kafka={...}",
            f"the Kafka client warns: {warning}",
            "remove that property from App(kafka={...}): it has no effect on a consumer",
        )  # fmt: skip


def of_budgets(settings: Mapping[str, ClientValue], budgets: Budgets, *, embedded: bool = False) -> Iterator[Finding]:
    """Times and sizes that contradict each other."""
    yield from _of_membership(settings, embedded)
    yield from _of_protocol(settings, budgets.shutdown)
    yield from _of_stopping(budgets.shutdown)
    yield from _of_memory(settings, budgets.memory)


def of_handlers(handlers: Sequence[Handler], *, embedded: bool = False) -> Iterator[Finding]:
    """Findings about the options and the store of each handler."""
    for handler in handlers:
        yield from _of_executor(handler)
        yield from _of_store(handler, embedded)


def of_cluster(handlers: Sequence[Handler], facts: ClusterFacts) -> Iterator[Finding]:
    """Missing topics and partitions."""
    if facts.unreachable is not None:
        problem, fix = _cause_and_fix(facts.unreachable)
        yield Finding("error", "broker-unreachable", "brokers", f"{problem}; topics were not checked", fix)
    if facts.topics is None:
        return
    written = {handler.to for handler in handlers if handler.to is not None}
    for topic in sorted(written | {topic for handler in handlers for topic in handler.topics}):
        if not facts.topics.get(topic):
            yield _missing_topic(topic, facts)
    for handler in handlers:
        yield from _of_partitions(handler, facts.topics)


def of_groups(settings: Mapping[str, ClientValue], facts: ClusterFacts) -> Iterator[Finding]:
    """Groups whose members use an assignor that this app does not have."""
    if protocol_of(settings) is GroupProtocol.CONSUMER:
        return
    ours = [name.strip() for name in str(settings[STRATEGY]).split(",")]
    for group, theirs in facts.assignors.items():
        if theirs not in ours:
            yield Finding(
                "error", "assignor-not-shared", f"group {group}",
                f"the members of the group use the assignor {theirs!r}, and this app uses {settings[STRATEGY]!r}, so "
                f"the group would refuse this app",
                f"stop those members before this app starts, or give this app a new group; or set "
                f"kafka={{{STRATEGY!r}: {theirs!r}}} until all of those members have stopped",
            )  # fmt: skip


def of_offsets(stored: Iterable[Stored], unread: Mapping[str, str]) -> Iterator[Finding]:
    """Stored offsets from which a run could not continue. A run would hold their partitions.

    Args:
        unread: for each store whose offsets could not be read, the reason.
    """
    for group, partition, position, topic_id, first, end in stored:
        offset = position.next_offset
        error: OffsetError | None = None
        if None not in (topic_id, position.topic_id) and topic_id != position.topic_id:
            error = recreated(group, partition, position, str(topic_id))
        elif not first <= offset <= end:
            error = out_of_range(partition, f"{offset} is stored, and the log goes from {first} to {end}")
        if error is not None:
            problem, _, fix = str(error).partition(f" {NOT_SKIPPED} ")
            yield Finding("error", code_of(error).replace("_", "-"), f"{partition} of group {group}", problem, fix)
    for store, why in unread.items():
        problem, fix = _cause_and_fix(why)
        yield Finding("warning", "offsets-not-checked", store, f"{problem}; stored offsets were not checked", fix)


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first, then warnings, then notes. Findings of one level keep their order; duplicates are dropped."""
    return sorted(dict.fromkeys(findings), key=lambda finding: LEVELS.index(finding.level))


# Membership


def _of_membership(settings: Mapping[str, ClientValue], embedded: bool) -> Iterator[Finding]:
    session = _number(settings, "session.timeout.ms")
    interval = _number(settings, "max.poll.interval.ms")
    heartbeat = _number(settings, "heartbeat.interval.ms")
    if session is not None and interval is not None and session > interval:
        yield Finding(
            "error", "session-over-poll-interval", "session.timeout.ms",
            f"session.timeout.ms ({session:g}) is above max.poll.interval.ms ({interval:g}), which the client refuses",
            f"set max.poll.interval.ms to {session:g} or more, or leave it out: polling never waits for handlers",
        )  # fmt: skip
    if session is not None and heartbeat is not None and heartbeat > session / 3:
        yield _slow_heartbeat(heartbeat, session)
    if session is not None and session < SHORTEST_SESSION and not embedded:
        yield Finding(
            "warning", "session-too-short", "session.timeout.ms",
            f"session.timeout.ms ({session:g}) is below what brokers accept by default: the group cannot be joined",
            f"set it to {SHORTEST_SESSION} or more, or lower group.min.session.timeout.ms on the brokers",
        )  # fmt: skip
    if settings.get("isolation.level") == "read_uncommitted":
        yield Finding(
            "warning", "reads-uncommitted", "isolation.level",
            "with read_uncommitted, records of transactions that were aborted are handled too",
            "leave isolation.level out, unless that is what you want",
        )  # fmt: skip


def _of_protocol(settings: Mapping[str, ClientValue], shutdown: float) -> Iterator[Finding]:
    if protocol_of(settings) is GroupProtocol.EAGER:
        yield Finding(
            "note", "eager-group", STRATEGY,
            f"with {STRATEGY}={settings[STRATEGY]!r} every rebalance stops all partitions of all members, until the "
            f"slowest of them has drained",
            "stop all members of the group, then leave this property out, so that the group uses cooperative-sticky",
        )  # fmt: skip
    session = _number(settings, "session.timeout.ms")
    if "group.instance.id" in settings and session is not None and session / 1000 <= shutdown:
        yield Finding(
            "warning", "session-under-restart", "session.timeout.ms",
            f"a static member keeps its partitions for session.timeout.ms ({session:g}), but a restart may take "
            f"longer, because stopping may take shutdown={shutdown:g} s: then the group rebalances",
            f"set session.timeout.ms to {(shutdown + 20) * 1000:.0f} or more",
        )  # fmt: skip


def _slow_heartbeat(heartbeat: float, session: float) -> Finding:
    dead = heartbeat >= session
    return Finding(
        "error" if dead else "warning", "heartbeat-too-slow", "heartbeat.interval.ms",
        f"heartbeat.interval.ms ({heartbeat:g}) is above a third of session.timeout.ms ({session:g}): "
        + ("every member is evicted between two heartbeats" if dead else "one or two lost heartbeats evict a member"),
        f"set heartbeat.interval.ms to {session / 3:.0f} or less, or raise session.timeout.ms",
    )  # fmt: skip


# Stopping


def _of_stopping(shutdown: float) -> Iterator[Finding]:
    if shutdown < SHORTEST_SHUTDOWN:
        yield Finding(
            "warning", "shutdown-too-short", "shutdown",
            f"shutdown={shutdown:g} s leaves handlers {shutdown * DRAIN_SHARE:.1f} s to finish, because the last "
            f"commit and leaving the group need the rest;"
            f" a slower handler is abandoned, and its record is handled again",
            "raise App(shutdown=...); 25 s, the default, fits into Kubernetes' grace period",
        )  # fmt: skip
    if shutdown >= KUBERNETES_GRACE:
        yield Finding(
            "note", "shutdown-over-grace", "shutdown",
            f"shutdown={shutdown:g} s is not shorter than Kubernetes' default grace period ({KUBERNETES_GRACE:g} s), "
            f"after which Kubernetes kills the process",
            f"in Kubernetes, set terminationGracePeriodSeconds: {shutdown + 5:.0f}",
        )  # fmt: skip


# Memory


def _of_memory(settings: Mapping[str, ClientValue], memory: int) -> Iterator[Finding]:
    queued = _number(settings, "queued.max.messages.kbytes")
    if queued is not None and queued * 1024 > memory:
        yield Finding(
            "warning", "queue-over-memory", "queued.max.messages.kbytes",
            f"the client may prefetch {_mebibytes(queued * 1024)} of records "
            f"(queued.max.messages.kbytes={queued:g}), more than memory={_mebibytes(memory)} allows in flight",
            f"set queued.max.messages.kbytes to {memory // 1024} or less, or raise App(memory=...)",
        )  # fmt: skip


# Handlers and their stores


def _of_executor(handler: Handler) -> Iterator[Finding]:
    if handler.executor != "inline":
        return
    yield Finding(
        "warning", "inline-executor", handler.name,
        f"{handler.name} runs on the polling thread (executor='inline'): if a call takes longer than "
        f"max.poll.interval.ms, the group evicts this consumer, and each rebalance waits for a running call",
        "leave executor= out, unless the handler never waits for anything",
    )  # fmt: skip
    if handler.concurrency is not None and handler.concurrency > 1:
        yield Finding(
            "warning", "concurrency-without-threads", handler.name,
            f"{handler.name} has concurrency={handler.concurrency}, which has no effect with executor='inline'",
            "leave out one of the two",
        )  # fmt: skip


def _of_store(handler: Handler, embedded: bool) -> Iterator[Finding]:
    if handler.store_trouble is not None:
        problem, fix = _cause_and_fix(handler.store_trouble)
        yield Finding(
            "error", "store-unusable", handler.store, f"offsets cannot be kept in {handler.store}: {problem}", fix
        )
    if handler.transactional_store and handler.transaction is None and not handler.own_guarantee:
        yield Finding(
            "warning", "transaction-not-taken", handler.name,
            f"{handler.name} does not take the transaction of {handler.store}, so it is at least once: what it "
            f"writes and the offset are committed separately",
            "add a parameter annotated with the store's connection, and write through it",
        )  # fmt: skip
    if handler.scheme == "memory" and not embedded:
        yield Finding(
            "warning", "memory-store", handler.group,
            f"the offsets of group {handler.group!r} are lost when the process ends (memory://): the next run begins "
            f"where start= says",
            "outside of tests, use offsets='kafka://', or 'sqlite:///file.db' for exactly once",
        )  # fmt: skip
    if handler.scheme == "kafka" and not embedded:
        yield Finding(
            "note", "kafka-offsets-expire", handler.group,
            f"Kafka deletes the offsets of group {handler.group!r} when the group has had no members for "
            f"offsets.retention.minutes (7 days by default): the next run then begins where start= says",
            "if the app may be stopped for longer, raise offsets.retention.minutes, or keep the offsets in a database",
        )  # fmt: skip
    if handler.scheme == "sqlite" and not handler.store.startswith("sqlite:////"):
        yield Finding(
            "note", "relative-file", handler.store,
            f"{handler.store} is a relative path: if the app starts in another folder, it uses another file",
            "in production, write the whole path: sqlite:////var/lib/shop/offsets.db",
        )  # fmt: skip


# Topics


def _missing_topic(topic: str, facts: ClusterFacts) -> Finding:
    if facts.makes_topics:
        return Finding(
            "note", "topic-not-yet", topic,
            f"topic {topic!r} is not on the embedded broker yet; the first producer that names the topic creates it",
            f"to choose the number of partitions: kconsume broker NAME --topic {topic}:4",
        )  # fmt: skip
    return Finding("error", "topic-missing", topic, *_cause_and_fix(facts.missing[topic]))


def _of_partitions(handler: Handler, topics: Mapping[str, int | None]) -> Iterator[Finding]:
    counts = [count for topic in handler.topics if (count := topics.get(topic))]
    if len(counts) < len(handler.topics):
        return
    if handler.partitions is not None and handler.partitions[-1] >= counts[0]:
        yield Finding(
            "error", "partition-missing", handler.name,
            f"{handler.name} wants partition {handler.partitions[-1]} of {handler.topics[0]!r}, which has "
            f"{counts[0]} partitions, numbered from 0",
            "correct partitions=, or add partitions to the topic",
        )  # fmt: skip
    if handler.concurrency is not None and handler.concurrency > sum(counts):
        yield Finding(
            "note", "idle-workers", handler.name,
            f"{handler.name} has concurrency={handler.concurrency}, but its topics have {sum(counts)} partitions in "
            f"all, and records of one partition are handled in order",
            "more partitions would use the other workers; otherwise leave concurrency= out",
        )  # fmt: skip


def _number(settings: Mapping[str, ClientValue], name: str) -> float | None:
    """The value as a number. None if it is missing, or not a number, which the client refuses itself."""
    try:
        return float(settings[name])
    except (KeyError, TypeError, ValueError):
        return None


def _cause_and_fix(error: str) -> tuple[str, str]:
    """Split the text of a kconsume error, which has the form `cause: fix`."""
    cause, _, fix = error.rpartition(": ")
    return cause, fix


def _mebibytes(size: float) -> str:
    return f"{size / 1024 / 1024:.3g} MiB"

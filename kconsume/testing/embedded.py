"""A Kafka in this process: librdkafka's own mock cluster, driven through the client's shared object.

Here are the C functions that are called, the things a test may do to such a Kafka (`KafkaControls`, said
once for this process and for the named brokers of `broker.py`), and the broker itself. It knows nothing of
handlers, stores or processes, and it is no proof of what a real Kafka does.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Self, TypeAlias, cast

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from kconsume.errors import ConfigurationError, EmbeddedBrokerError

Argument: TypeAlias = int | str | Sequence[int]

# The numbers are Kafka's (https://kafka.apache.org/protocol#protocol_api_keys); only what the mock serves.
API_KEYS: Mapping[str, int] = {
    "Produce": 0,
    "Fetch": 1,
    "ListOffsets": 2,
    "Metadata": 3,
    "OffsetCommit": 8,
    "OffsetFetch": 9,
    "FindCoordinator": 10,
    "JoinGroup": 11,
    "Heartbeat": 12,
    "LeaveGroup": 13,
    "SyncGroup": 14,
    "ApiVersions": 18,
    "InitProducerId": 22,
    "OffsetForLeaderEpoch": 23,
    "AddPartitionsToTxn": 24,
    "AddOffsetsToTxn": 25,
    "EndTxn": 26,
    "TxnOffsetCommit": 28,
    "ConsumerGroupHeartbeat": 68,
}

_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")
_LIST_DEADLINE = 5.0
_EVERY_BROKER = -1
_HEARTBEAT_MS = 100


class KafkaControls(ABC):
    """What can be done to an embedded Kafka, wherever it runs. Brokers are numbered from 1."""

    @property
    @abstractmethod
    def bootstrap(self) -> str:
        """What clients take as `bootstrap.servers`."""

    @abstractmethod
    def _tell(self, function: str, *arguments: Argument) -> int:
        """Call one of `CONTROLS` on the cluster; a Kafka error code comes back, 0 for done."""

    def topics(self) -> dict[str, int]:
        """Each topic with its number of partitions, also those that clients brought into being."""
        client = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 2})
        try:
            known = client.list_topics(timeout=_LIST_DEADLINE).topics
        except KafkaException as error:
            raise EmbeddedBrokerError(
                f"the embedded broker at {self.bootstrap} did not list its topics in {_LIST_DEADLINE:g} s "
                f"({error.args[0].name()}): is it stopped, or down (broker_up() brings it back)?"
            ) from error
        return {name: len(topic.partitions) for name, topic in known.items()}

    def create_topic(self, name: str, partitions: int = 4, *, exist_ok: bool = False) -> None:
        """Make a topic. One that is there is an error, unless `exist_ok` and its partitions are as many."""
        if not _TOPIC_NAME.fullmatch(name) or name in {".", ".."}:
            raise ConfigurationError(f"{name!r} is no topic name: use 1 to 249 of a-z A-Z 0-9 . _ -")
        if partitions < 1:
            raise ConfigurationError(f"topic {name!r} needs at least one partition, not {partitions}")
        code = self._tell("topic_create", name, partitions, 1)
        if exist_ok and code == KafkaError.TOPIC_ALREADY_EXISTS:
            self._must_have(name, partitions)
        else:
            _check(code, f"topic {name!r} cannot be created")

    def _must_have(self, name: str, partitions: int) -> None:
        existing = self.topics().get(name)
        if existing != partitions:
            raise EmbeddedBrokerError(
                f"topic {name!r} has {existing} partitions and not {partitions}: delete it first, or take another name"
            )

    def delete_topic(self, name: str) -> None:
        """Delete a topic and its records; one of the same name gets another id."""
        _check(self._tell("topic_delete", name), f"topic {name!r} cannot be deleted")

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        """Drop the records below the offset `before`, as retention would."""
        code = self._tell("partition_delete_records", topic, partition, before)
        _check(code, f"records of {topic}/{partition} before {before} cannot be deleted")

    def fail_next(self, api: str, *errors: int) -> None:
        """Answer the next requests of this kind with these `KafkaError` codes, one each, in order.

        `KafkaError._TRANSPORT` cuts the connection instead; 0 lets a request pass. Names are Kafka's:
        "Fetch", "OffsetCommit", "JoinGroup" …
        """
        if not errors:
            raise ConfigurationError(f"fail_next({api!r}) needs at least one KafkaError code")
        self._tell("push_request_errors_array", _api_key(api), errors)

    def clear_failures(self, api: str) -> None:
        """Take back what `fail_next` has prepared and no request has met yet."""
        self._tell("clear_request_errors", _api_key(api))

    def broker_down(self, broker: int | None = None) -> None:
        """Cut the clients off and refuse new connections; all brokers for None. Leaders stay."""
        code = self._tell("broker_set_down", _EVERY_BROKER if broker is None else broker)
        _check(code, f"broker {broker} cannot be taken down")

    def broker_up(self, broker: int | None = None) -> None:
        """Accept connections again; all brokers for None."""
        code = self._tell("broker_set_up", _EVERY_BROKER if broker is None else broker)
        _check(code, f"broker {broker} cannot be brought up")

    def round_trip(self, broker: int | None, ms: int) -> None:
        """Delay each answer of the broker by this many milliseconds; all brokers for None."""
        code = self._tell("broker_set_rtt", _EVERY_BROKER if broker is None else broker, ms)
        _check(code, f"broker {broker} cannot be slowed down")

    def move_leader(self, topic: str, partition: int, broker: int) -> None:
        """Make the broker the partition's leader; -1 leaves it without one."""
        code = self._tell("partition_set_leader", topic, partition, broker)
        _check(code, f"{topic}/{partition} cannot be led by broker {broker}")

    def move_coordinator(self, key: str, broker: int, *, kind: Literal["group", "transaction"] = "group") -> None:
        """Make the broker the coordinator of this group, or of this transactional id."""
        code = self._tell("coordinator_set", kind, key, broker)
        _check(code, f"broker {broker} cannot coordinate {kind} {key!r}")


class EmbeddedKafka(KafkaControls):
    """A Kafka in this process, for tests and for trying things out; nothing to install.

        with EmbeddedKafka({"orders": 4}) as kafka:
            producer = Producer({"bootstrap.servers": kafka.bootstrap})

    Real clients talk to it over TCP. Groups assign at once. Its limits:

    - it listens on 127.0.0.1, keeps all in memory, and is gone with the process, or in a forked child, or when the
      process changes its user (`os.seteuid`), which interrupts all threads;
    - it keeps about 5 MB a partition: the oldest records go first, and a record over 5 MB is lost at once;
    - it has no admin requests: make topics here. One that is not there is made by the first producer that
      names it, with 4 partitions (librdkafka's number, not to be changed), and by no consumer;
    - a change in a classic group takes `session.timeout.ms` - 1 s (set 2000 in tests), a cooperative one
      twice that; in a KIP-848 group (`group.protocol=consumer`) about 0.1 s;
    - it proves nothing about transactions (aborted records are delivered, no producer is fenced), static
      membership, truncation, look-ups by timestamp or retention by time.
    """

    def __init__(self, topics: Mapping[str, int] | None = None, *, brokers: int = 1) -> None:
        if brokers < 1:
            raise ConfigurationError(f"an embedded Kafka needs at least one broker, not {brokers}")
        self._topics = dict(topics or {})
        self._brokers = brokers
        self._guard = threading.RLock()
        self._client = 0
        self._cluster = 0
        self._home = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen, and make the topics. Does nothing if started."""
        with self._guard:
            if self._cluster:
                return
            self._home = os.getpid()
            self._client = _new_client()
            self._cluster = _librdkafka().rd_kafka_mock_cluster_new(self._client, self._brokers)
            try:
                self._settle()
            except BaseException:
                self.stop()
                raise

    def _settle(self) -> None:
        if not self._cluster:
            raise EmbeddedBrokerError("librdkafka could not listen on 127.0.0.1: are there free ports?")
        self._tell("group_initial_rebalance_delay_ms", 0)
        self._tell("set_group_consumer_heartbeat_interval_ms", _HEARTBEAT_MS)
        # With no controller, admin clients wait out their deadline instead of hearing "unsupported".
        self._tell("set_controller_id", 1)
        for name, partitions in self._topics.items():
            self.create_topic(name, partitions)

    def stop(self) -> None:
        """Cut the clients off and forget everything. Does nothing if stopped."""
        if self._forked():
            return  # the child has the handles, but not the threads behind them: to destroy would hang
        with self._guard:
            client, cluster, self._client, self._cluster = self._client, self._cluster, 0, 0
            if cluster:
                _librdkafka().rd_kafka_mock_cluster_destroy(cluster)
            if client:
                _librdkafka().rd_kafka_destroy(client)

    @property
    def bootstrap(self) -> str:
        with self._running() as cluster:
            address: bytes = _librdkafka().rd_kafka_mock_cluster_bootstraps(cluster)
            return address.decode()

    def count_requests(self) -> int:
        """How many requests came in since the last call; the first call begins the counting."""
        with self._running() as cluster:
            library, count = _librdkafka(), ctypes.c_size_t()
            requests = library.rd_kafka_mock_get_requests(cluster, ctypes.byref(count))
            library.rd_kafka_mock_request_destroy_array(requests, count)
            library.rd_kafka_mock_clear_requests(cluster)
            library.rd_kafka_mock_start_request_tracking(cluster)
            return count.value

    def _tell(self, function: str, *arguments: Argument) -> int:
        with self._running() as cluster:
            code: int | None = _control(function)(cluster, *_c_arguments(arguments))
            return code or 0

    @contextlib.contextmanager
    def _running(self) -> Iterator[int]:
        if self._forked():
            raise EmbeddedBrokerError(
                f"this EmbeddedKafka lives in process {self._home}, of which this one is a fork: "
                "share a broker between processes as embedded://NAME"
            )
        with self._guard:  # held during the call, so that no stop() frees the cluster under it
            if not self._cluster:
                raise EmbeddedBrokerError("this EmbeddedKafka is not running: start() it, or use `with`")
            yield self._cluster

    def _forked(self) -> bool:
        return self._home not in (0, os.getpid())


def _api_key(api: str) -> int:
    try:
        return API_KEYS[api]
    except KeyError:
        raise ConfigurationError(f"{api!r} is no request to fail: use one of {', '.join(API_KEYS)}") from None


def _check(code: int, what: str) -> None:
    if code:
        error = KafkaError(code)
        raise EmbeddedBrokerError(f"{what}: {error.name()} ({error.str()})")


# The C side. Every function has its types here: ctypes would cut a pointer it does not know of to 32 bits.

_pointer, _text, _int = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
_int16, _int32, _int64, _size = ctypes.c_int16, ctypes.c_int32, ctypes.c_int64, ctypes.c_size_t
_CType: TypeAlias = type["ctypes._CDataType"]

_LIFE: Mapping[str, tuple[_CType | None, tuple[_CType, ...]]] = {
    "conf_new": (_pointer, ()),
    "conf_set": (_int, (_pointer, _text, _text, _text, _size)),
    "conf_destroy": (None, (_pointer,)),
    "new": (_pointer, (_int, _pointer, _text, _size)),
    "destroy": (None, (_pointer,)),
    "mock_cluster_new": (_pointer, (_pointer, _int)),
    "mock_cluster_destroy": (None, (_pointer,)),
    "mock_cluster_bootstraps": (_text, (_pointer,)),
    "mock_start_request_tracking": (None, (_pointer,)),
    "mock_get_requests": (_pointer, (_pointer, ctypes.POINTER(_size))),
    "mock_request_destroy_array": (None, (_pointer, _size)),
    "mock_clear_requests": (None, (_pointer,)),
}

CONTROLS: Mapping[str, tuple[_CType | None, tuple[_CType, ...]]] = {
    "topic_create": (_int, (_text, _int, _int)),
    "topic_delete": (_int, (_text,)),
    "partition_set_leader": (_int, (_text, _int32, _int32)),
    "partition_delete_records": (_int, (_text, _int32, _int64)),
    "push_request_errors_array": (None, (_int16, _size, ctypes.POINTER(_int))),
    "clear_request_errors": (None, (_int16,)),
    "broker_set_down": (_int, (_int32,)),
    "broker_set_up": (_int, (_int32,)),
    "broker_set_rtt": (_int, (_int32, _int)),
    "coordinator_set": (_int, (_text, _text, _int32)),
    "group_initial_rebalance_delay_ms": (None, (_int32,)),
    "set_group_consumer_heartbeat_interval_ms": (None, (_int,)),
    "set_controller_id": (None, (_int32,)),
}
"""What `_tell` can call: the name after `rd_kafka_mock_`, its result, its arguments after the cluster."""


def _c_arguments(arguments: Sequence[Argument]) -> Iterator[object]:
    for argument in arguments:
        if isinstance(argument, str):
            yield argument.encode()
        elif isinstance(argument, int):
            yield argument
        else:
            yield len(argument)
            yield (_int * len(argument))(*argument)


def _control(function: str) -> Callable[..., int | None]:
    if function not in CONTROLS:
        raise EmbeddedBrokerError(f"{function!r} is nothing an embedded broker can do")
    result, arguments = CONTROLS[function]
    return _typed(_librdkafka(), f"mock_{function}", result, (_pointer, *arguments))


def _typed(
    library: ctypes.CDLL, function: str, result: _CType | None, arguments: tuple[_CType, ...]
) -> Callable[..., int | None]:
    try:
        pointer = getattr(library, f"rd_kafka_{function}")
    except AttributeError:
        raise EmbeddedBrokerError(
            f"librdkafka {confluent_kafka.libversion()[0]} has no rd_kafka_{function}: "
            "install confluent-kafka 2.16 or later"
        ) from None
    pointer.restype, pointer.argtypes = result, arguments
    return cast("Callable[..., int | None]", pointer)


@functools.cache
def _librdkafka() -> ctypes.CDLL:
    path = _find_librdkafka()
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise EmbeddedBrokerError(f"{path} cannot be loaded ({error}): reinstall confluent-kafka") from error
    for function, (result, arguments) in _LIFE.items():
        _typed(library, function, result, arguments)
    return library


def _find_librdkafka() -> str:
    package = Path(confluent_kafka.__file__).parent
    in_wheel = [
        *package.with_name("confluent_kafka.libs").glob("librdkafka*.so*"),  # Linux
        *package.joinpath(".dylibs").glob("librdkafka*.dylib"),  # macOS
    ]
    found = str(in_wheel[0]) if in_wheel else ctypes.util.find_library("rdkafka")
    if found is None:
        raise EmbeddedBrokerError(
            f"no librdkafka beside {package} nor in the system's library path: "
            "install confluent-kafka from a wheel (pip install --only-binary :all: confluent-kafka)"
        )
    return found


def _new_client() -> int:
    library, reason = _librdkafka(), ctypes.create_string_buffer(512)
    settings = library.rd_kafka_conf_new()
    # Errors only: this client exists to carry the cluster, and would warn that it has no bootstrap.servers.
    library.rd_kafka_conf_set(settings, b"log_level", b"3", reason, len(reason))
    client: int | None = library.rd_kafka_new(0, settings, reason, len(reason))
    if not client:
        library.rd_kafka_conf_destroy(settings)
        raise EmbeddedBrokerError(f"librdkafka could not start: {reason.value.decode(errors='replace')}")
    return client

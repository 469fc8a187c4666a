"""`EmbeddedKafka`: a Kafka in this process, which is librdkafka's own mock cluster.

This file must not know handlers, stores or other processes. A test with the mock cluster is no proof for a real Kafka.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Self

from kconsume._embedded.controls import Argument, KafkaControls
from kconsume._embedded.librdkafka import c_arguments, control_function, librdkafka, new_client
from kconsume.errors import ConfigurationError, EmbeddedBrokerError

_HEARTBEAT_MS = 100


class EmbeddedKafka(KafkaControls):
    """A Kafka in this process, for tests and for trying things out. Nothing has to be installed.

        with EmbeddedKafka({"orders": 4}) as kafka:
            producer = Producer({"bootstrap.servers": kafka.bootstrap})

    Real clients connect over TCP. Groups get their assignment at once. Limits:

    - it listens on 127.0.0.1, keeps everything in memory, and ends with the process. It does not work in a forked
      child, and ends when the process changes its user (`os.seteuid`), which interrupts all threads;
    - it keeps about 5 MB for each partition: the oldest records are dropped first, and a record over 5 MB at once;
    - it has no admin requests, so create topics here. The first producer that names a missing topic creates it with 4
      partitions (librdkafka's number, which cannot be changed). Consumers create no topic;
    - a rebalance of a classic group takes `session.timeout.ms` - 1 s (set 2000 in tests), a cooperative rebalance twice
      that; a rebalance of a KIP-848 group (`group.protocol=consumer`) takes about 0.1 s;
    - it proves nothing about transactions (aborted records are delivered, no producer is fenced), static membership,
      truncation, look-ups by timestamp or retention by time.

    Args:
        topics: topics to create at the start, each with its number of partitions.
        brokers: how many brokers the cluster has. 1 or more.
    """

    def __init__(self, topics: Mapping[str, int] | None = None, *, brokers: int = 1) -> None:
        if brokers < 1:
            raise ConfigurationError(f"an embedded Kafka needs at least one broker, not {brokers}: give brokers=1")
        self._topics = dict(topics or {})
        self._brokers = brokers
        self._lock = threading.RLock()
        self._client = 0
        """librdkafka's handle, 0 when stopped. Written and read under the lock."""
        self._cluster = 0
        """The mock cluster's handle, 0 when stopped. Written and read under the lock."""
        self._pid = 0
        """The process that started the cluster. 0 before the first start."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen, and create the topics. Does nothing if the cluster is already started."""
        with self._lock:
            if self._cluster:
                return
            self._pid = os.getpid()
            self._client = new_client()
            self._cluster = librdkafka().rd_kafka_mock_cluster_new(self._client, self._brokers)
            try:
                self._configure()
            except BaseException:
                self.stop()
                raise

    def _configure(self) -> None:
        if not self._cluster:
            raise EmbeddedBrokerError(
                "librdkafka could not listen on 127.0.0.1: check that there are free ports on this machine"
            )
        self.control("group_initial_rebalance_delay_ms", 0)
        self.control("set_group_consumer_heartbeat_interval_ms", _HEARTBEAT_MS)
        # Without a controller, admin clients wait until their deadline instead of getting the answer "unsupported".
        self.control("set_controller_id", 1)
        for name, partitions in self._topics.items():
            self.create_topic(name, partitions)

    def stop(self) -> None:
        """Close the connections of all clients and drop all records. Does nothing if the cluster is already stopped."""
        if self._forked():
            return  # a forked child has the handles but not their threads, so destroying the handles would hang
        with self._lock:
            client, cluster, self._client, self._cluster = self._client, self._cluster, 0, 0
            if cluster:
                librdkafka().rd_kafka_mock_cluster_destroy(cluster)
            if client:
                librdkafka().rd_kafka_destroy(client)

    @property
    def bootstrap(self) -> str:
        with self._running() as cluster:
            address: bytes = librdkafka().rd_kafka_mock_cluster_bootstraps(cluster)
            return address.decode()

    def count_requests(self) -> int:
        """Return how many requests came since the last call. The first call starts the count."""
        with self._running() as cluster:
            library, count = librdkafka(), ctypes.c_size_t()
            requests = library.rd_kafka_mock_get_requests(cluster, ctypes.byref(count))
            library.rd_kafka_mock_request_destroy_array(requests, count)
            library.rd_kafka_mock_clear_requests(cluster)
            library.rd_kafka_mock_start_request_tracking(cluster)
            return count.value

    def control(self, function: str, *arguments: Argument) -> int:
        with self._running() as cluster:
            code: int | None = control_function(function)(cluster, *c_arguments(arguments))
            return code or 0

    @contextlib.contextmanager
    def _running(self) -> Iterator[int]:
        if self._forked():
            raise EmbeddedBrokerError(
                f"this EmbeddedKafka lives in process {self._pid}, and this process is a fork of that one: "
                "share a broker between processes as embedded://NAME"
            )
        with self._lock:  # held during the call, so that no stop() frees the cluster meanwhile
            if not self._cluster:
                raise EmbeddedBrokerError("this EmbeddedKafka is not running: call start(), or use `with`")
            yield self._cluster

    def _forked(self) -> bool:
        return self._pid not in (0, os.getpid())

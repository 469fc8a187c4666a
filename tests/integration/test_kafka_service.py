"""The test broker itself: it keeps its data, can be broken and mended, and never outlives its test run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from kconsume.errors import ServiceUnavailable
from kconsume.testing.services import KafkaService, LocalKafka
from kconsume.testing.services.java import find_java
from kconsume.testing.services.kafka import settings
from kconsume.testing.services.kafka.jars import kafka_jars
from kconsume.testing.services.kafka.jvm_class_cache import archive_of, make_archive
from kconsume.testing.services.kafka.ready import answers
from tests.fix_kafka import MakeTopic, create_topic, delete_topics, produce, unique
from tests.waiting import eventually


@pytest.fixture(scope="module")
def own_kafka() -> Iterator[LocalKafka]:
    with LocalKafka() as broker:
        yield broker


def test_records_survive_kill_9_and_a_restart_on_the_same_port(own_kafka: LocalKafka) -> None:
    name, address, pid = unique("kept"), own_kafka.bootstrap, own_kafka.pid
    create_topic(AdminClient({"bootstrap.servers": address}), name, partitions=2)
    values = [b"%d" % number for number in range(1000)]
    assert produce(address, name, values, keys=values) == 1000

    own_kafka.kill()
    assert not own_kafka.running
    own_kafka.start()

    assert own_kafka.bootstrap == address
    assert own_kafka.pid != pid
    assert sorted(read(address, name, partitions=2)) == sorted(values)


def test_a_frozen_broker_is_silent_until_it_is_thawed(own_kafka: LocalKafka) -> None:
    own_kafka.freeze()
    assert answers(own_kafka.bootstrap) is not None
    own_kafka.thaw()
    eventually(lambda: answers(own_kafka.bootstrap) is None, what="an answer of the thawed broker")


def test_an_orderly_stop_ends_a_frozen_broker_too_and_keeps_the_data(own_kafka: LocalKafka) -> None:
    own_kafka.freeze()
    own_kafka.restart()
    assert answers(own_kafka.bootstrap) is None


def test_it_starts_from_the_archive_of_its_classes(own_kafka: LocalKafka) -> None:
    archive = archive_of(find_java().executable, kafka_jars())
    make_archive(archive, lambda written: LocalKafka(recorded=written))
    own_kafka.restart()
    assert str(archive) in Path(f"/proc/{own_kafka.pid}/maps").read_text(), "else a start costs twice as much"


@pytest.mark.parametrize("frozen", [False, True], ids=["running", "frozen"])
def test_the_broker_and_its_folder_are_gone_when_its_parent_is_killed_with_9(frozen: bool) -> None:
    owner, pid, folder = start_owner()
    if frozen:
        os.kill(pid, signal.SIGSTOP)
    owner.kill()
    owner.wait()
    eventually(lambda: is_gone(pid), what="the end of the broker")
    eventually(lambda: not folder.exists(), what="the removal of its folder")


def test_the_broker_is_gone_when_its_leash_is_killed_with_9() -> None:
    owner, pid, folder = start_owner()
    os.kill(parent_of(pid), signal.SIGKILL)
    eventually(lambda: is_gone(pid), what="the end of the broker")
    owner.send_signal(signal.SIGINT)  # as Ctrl-C: the owner tidies up itself
    owner.wait()
    assert not folder.exists()


def test_a_setting_that_kafka_refuses_is_an_error_with_kafka_s_own_words() -> None:
    broker = LocalKafka(overrides={"num.io.threads": "none"})
    with pytest.raises(ServiceUnavailable, match=r"num\.io\.threads"), broker:
        pass
    assert not broker.folder.exists()


def test_a_topic_that_the_test_itself_deleted_does_not_upset_the_fixture(
    kafka_admin: AdminClient, topic: MakeTopic
) -> None:
    delete_topics(kafka_admin, [topic()])


def test_the_container_s_variables_mean_the_same_settings(tmp_path: Path) -> None:
    """Asked of the class with which the `apache/kafka` image reads them; it is in the broker's jar."""
    listeners = settings.local_listeners(9092, 9093)
    wanted = settings.broker_settings(listeners, str(tmp_path / "data"))
    command = [
        str(find_java().executable),
        "-cp",
        f"{kafka_jars()}/*",
        "kafka.docker.KafkaDockerWrapper",
        "setup",
    ]
    for kind in ("default", "mounted", "final"):
        (tmp_path / kind).mkdir()
        command += [f"--{kind}-configs-dir", str(tmp_path / kind)]
    (tmp_path / "default" / "server.properties").touch()
    for name in ("log4j2.yaml", "tools-log4j2.yaml"):
        (tmp_path / "default" / name).write_text("Configuration: {Loggers: {Root: {level: info}}}")
    variables = {"CLUSTER_ID": settings.CLUSTER_ID, **settings.as_environment(wanted)}

    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "final" / "server.properties").read_text().split()
    assert dict(line.split("=", 1) for line in lines) == wanted


def test_a_topic_of_the_run_s_broker_is_ready_when_the_fixture_returns(kafka: KafkaService, topic: MakeTopic) -> None:
    name = topic(partitions=3)
    assert produce(kafka.bootstrap, name, [b"only"], partition=2) == 1
    assert read(kafka.bootstrap, name, partitions=3) == [b"only"]


def read(bootstrap: str, topic: str, partitions: int) -> list[bytes]:
    """All values that are in the topic now."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": unique("reader")})
    try:
        places = [TopicPartition(topic, number, 0) for number in range(partitions)]
        ends = [consumer.get_watermark_offsets(place, timeout=20) for place in places]
        expected = sum(end - start for start, end in ends)
        consumer.assign(places)
        values: list[bytes] = []

        def complete() -> bool:
            values.extend(message.value() or b"" for message in consumer.consume(500, timeout=0.1))
            return len(values) >= expected

        eventually(complete, what=f"{expected} records of {topic}")
        return values
    finally:
        consumer.close()


def start_owner() -> tuple[subprocess.Popen[str], int, Path]:
    """Another process that owns a broker: the process, the broker's id and its folder."""
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": _ROOT},
    )
    assert owner.stdout is not None
    with owner.stdout as said:
        pid, folder = said.readline().split(maxsplit=1)
    return owner, int(pid), Path(folder.strip())


_ROOT = str(Path(__file__).parent.parent.parent)

_OWNER = """
import signal
from kconsume.testing.services import LocalKafka

with LocalKafka() as broker:
    print(broker.pid, broker.folder, flush=True)
    try:
        signal.pause()
    except KeyboardInterrupt:
        pass
"""


def is_gone(pid: int) -> bool:
    try:
        return status(pid)[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it goes while its file is read
        return True


def parent_of(pid: int) -> int:
    return int(status(pid)[1])


def status(pid: int) -> list[str]:
    """What follows the command's name in the kernel's line about a process: its state, its parent, …"""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()

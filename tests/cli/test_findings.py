"""The findings of `check`, one by one, from values only."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import psycopg
import pytest

import kconsume
from kconsume import errors
from kconsume._config.client_settings import ClientValue, client_settings
from kconsume.backends import OffsetStore, PostgresStore, RedisStore
from kconsume.backends.postgres.address import Address
from kconsume.cli.check.error_text import problem_and_fix
from kconsume.cli.check.findings import (
    Budgets,
    ClientFacts,
    ClusterFacts,
    Finding,
    Handler,
    of_app,
    of_budgets,
    of_client,
    of_cluster,
    of_groups,
    of_handlers,
    ordered,
)
from kconsume.cli.check.postgres import of_stores as of_postgres_stores
from kconsume.cli.check.redis import of_stores as of_redis_stores
from kconsume.errors import ConfigurationError, StoreError, StoreUnavailable

SETTINGS = client_settings("localhost:9092", "shop", {})
BUDGETS = Budgets(shutdown=25.0, memory=64 * 1024 * 1024)


def handler(
    store: str = "sqlite:////shop.db",
    *,
    topics: tuple[str, ...] = ("orders",),
    transaction: str | None = "sqlite3.Connection",
    transactional_store: bool = True,
    executor: str = "thread",
    concurrency: int | None = None,
    partitions: tuple[int, ...] | None = None,
) -> Handler:
    return Handler(
        "reserve",
        topics,
        "shop",
        store,
        transaction=transaction,
        transactional_store=transactional_store,
        executor=executor,
        concurrency=concurrency,
        partitions=partitions,
    )


def codes(findings: Iterable[Finding]) -> list[tuple[str, str]]:
    return [(finding.level, finding.code) for finding in findings]


def test_the_defaults_are_beyond_reproach() -> None:
    assert codes(of_budgets(SETTINGS, BUDGETS)) == []
    assert codes(of_handlers([handler()])) == []
    assert codes(of_app("localhost:9092", [handler()])) == []
    assert codes(of_cluster([handler()], ClusterFacts({"orders": 4}))) == []
    assert codes(of_client(ClientFacts())) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"session.timeout.ms": 300_001}, [("error", "session-over-poll-interval")]),
        ({"session.timeout.ms": "300001"}, [("error", "session-over-poll-interval")]),
        ({"session.timeout.ms": 300_000}, []),
        ({"heartbeat.interval.ms": 15_000}, []),
        ({"heartbeat.interval.ms": 15_001}, [("warning", "heartbeat-too-slow")]),
        ({"heartbeat.interval.ms": 45_000}, [("error", "heartbeat-too-slow")]),
        ({"session.timeout.ms": 5_999, "heartbeat.interval.ms": 1000}, [("warning", "session-too-short")]),
        ({"isolation.level": "read_uncommitted"}, [("warning", "reads-uncommitted")]),
        ({"max.poll.interval.ms": 45_000}, []),
        ({"queued.max.messages.kbytes": 65_536}, []),
        ({"queued.max.messages.kbytes": 65_537}, [("warning", "queue-over-memory")]),
        ({"session.timeout.ms": "soon"}, []),
    ],
)
def test_settings_that_contradict_each_other_are_found(
    settings: Mapping[str, ClientValue], expected: list[tuple[str, str]]
) -> None:
    assert codes(of_budgets({**SETTINGS, **settings}, BUDGETS)) == expected


@pytest.mark.parametrize(
    ("shutdown", "expected"),
    [
        (4.9, [("warning", "shutdown-too-short")]),
        (5.0, []),
        (29.0, []),
        (30.0, [("note", "shutdown-over-grace")]),
    ],
)
def test_time_to_stop_must_be_enough_and_fit_into_the_grace_period(
    shutdown: float, expected: list[tuple[str, str]]
) -> None:
    assert codes(of_budgets(SETTINGS, Budgets(shutdown, BUDGETS.memory))) == expected


@pytest.mark.parametrize(
    ("instance", "session", "shutdown", "expected"),
    [
        ("pod-1", 45_000, 25.0, []),
        ("pod-1", 25_001, 25.0, []),
        ("pod-1", 25_000, 25.0, [("warning", "session-under-restart")]),
        ("pod-1", 10_000, 25.0, [("warning", "session-under-restart")]),
        (None, 10_000, 25.0, []),
    ],
)
def test_the_session_of_a_static_member_must_outlast_its_restart(
    instance: str | None, session: int, shutdown: float, expected: list[tuple[str, str]]
) -> None:
    settings = client_settings("localhost:9092", "shop", {"session.timeout.ms": session}, instance=instance)
    findings = list(of_budgets(settings, Budgets(shutdown, BUDGETS.memory)))
    assert codes(findings) == expected
    if expected:
        assert f"session.timeout.ms ({session})" in findings[0].problem
        assert findings[0].fix == "set session.timeout.ms to 45000 or more"


def test_the_session_of_a_kip_848_group_is_the_brokers_and_not_judged_here() -> None:
    settings = client_settings("localhost:9092", "shop", {"group.protocol": "consumer"}, instance="pod-1")
    assert codes(of_budgets(settings, BUDGETS)) == []


@pytest.mark.parametrize("strategy", ["range", "roundrobin", "range,roundrobin"])
def test_a_group_in_which_everybody_stops_is_noted(strategy: str) -> None:
    settings = client_settings("localhost:9092", "shop", {"partition.assignment.strategy": strategy})
    (finding,) = of_budgets(settings, BUDGETS)
    assert codes([finding]) == [("note", "eager-group")]
    assert repr(strategy) in finding.problem


def test_a_short_session_is_right_on_the_embedded_broker() -> None:
    settings = client_settings("embedded://", "shop", {}, embedded=True)

    assert codes(of_budgets(settings, BUDGETS, embedded=True)) == []
    assert codes(of_budgets(settings, BUDGETS)) == [("warning", "session-too-short")]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (handler(transaction=None), [("warning", "transaction-not-taken")]),
        (handler(executor="inline"), [("warning", "inline-executor")]),
        (
            handler(executor="inline", concurrency=4),
            [("warning", "inline-executor"), ("warning", "concurrency-without-threads")],
        ),
        (handler("memory://", transaction=None, transactional_store=False), [("warning", "memory-store")]),
        (handler("kafka://", transaction=None, transactional_store=False), [("note", "kafka-offsets-expire")]),
        (handler("sqlite:///shop.db"), [("note", "relative-file")]),
    ],
)
def test_what_a_handler_gives_up_is_found(facts: Handler, expected: list[tuple[str, str]]) -> None:
    assert codes(of_handlers([facts])) == expected


@pytest.mark.parametrize("store", ["memory://", "kafka://"])
def test_a_store_for_tests_is_no_finding_on_the_embedded_broker(store: str) -> None:
    facts = handler(store, transaction=None, transactional_store=False)

    assert codes(of_handlers([facts], embedded=True)) == []


@pytest.mark.parametrize(
    ("facts", "cluster", "expected"),
    [
        (handler(), ClusterFacts(unreachable="nobody answered: start it"), [("error", "broker-unreachable")]),
        (handler(), ClusterFacts({"orders": None}, missing={"orders": "gone: make it"}), [("error", "topic-missing")]),
        (handler(), ClusterFacts({"orders": None}, makes_topics=True), [("note", "topic-not-yet")]),
        (handler(partitions=(0, 3)), ClusterFacts({"orders": 4}), []),
        (handler(partitions=(0, 4)), ClusterFacts({"orders": 4}), [("error", "partition-missing")]),
        (handler(concurrency=5), ClusterFacts({"orders": 4}), [("note", "idle-workers")]),
        (handler(concurrency=5, topics=("orders", "returns")), ClusterFacts({"orders": 4, "returns": 1}), []),
        (handler(), ClusterFacts(), []),
    ],
)
def test_what_the_cluster_does_not_have_is_found(
    facts: Handler, cluster: ClusterFacts, expected: list[tuple[str, str]]
) -> None:
    assert codes(of_cluster([facts], cluster)) == expected


def unusable(store: OffsetStore, error: Exception, monkeypatch: pytest.MonkeyPatch) -> Finding:
    """What `check` finds about a PostgreSQL or a Redis that raises this error when it is asked."""

    def refuse(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(Address, "connect", refuse)
    monkeypatch.setattr(RedisStore, "examine", refuse)
    (finding,) = [*of_postgres_stores([store]), *of_redis_stores([store])]
    return finding


class TablesGone(psycopg.errors.UndefinedTable):
    diag = SimpleNamespace(message_primary='relation "kconsume_offsets" does not exist')  # type: ignore[assignment]


def test_the_fix_for_missing_tables_begins_before_the_braces_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    error = TablesGone('ERROR: relation "kconsume_offsets" does not exist')
    finding = unusable(PostgresStore("postgresql://db/shop"), error, monkeypatch)

    assert finding.code == "store-unusable"
    assert finding.problem == (
        "postgresql://db/shop does not have the tables of kconsume any more "
        '(ERROR: relation "kconsume_offsets" does not exist)'
    )
    assert finding.fix.startswith("stop the group's processes and restore the tables")
    assert "store.reset(group, {partition: offset}) has set one" in finding.fix


@pytest.mark.parametrize(
    "kind",
    [
        psycopg.errors.QueryCanceled,  # each kind has a sentence of its own in `store_error`
        psycopg.errors.LockNotAvailable,
        psycopg.errors.InsufficientPrivilege,
        psycopg.errors.FeatureNotSupported,
        psycopg.errors.ReadOnlySqlTransaction,
        psycopg.errors.DeadlockDetected,
        psycopg.errors.DiskFull,
        psycopg.errors.RaiseException,
        psycopg.OperationalError,
    ],
)
def test_the_words_of_postgresql_are_never_shown_as_the_fix(
    kind: type[psycopg.Error], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = kind('ERROR: no luck at "a: b"\nHINT: none :)')
    finding = unusable(PostgresStore("postgresql://db/shop"), error, monkeypatch)

    assert finding.problem.startswith("postgresql://db/shop ")
    assert finding.fix
    assert not {"luck", "HINT", "none", "b"} & set(finding.fix.replace('"', " ").replace(")", " ").split())


@pytest.mark.parametrize(
    ("error", "problem", "fix"),
    [
        (
            ConfigurationError("redis://r/0 is Redis 5: offsets need version 6 or newer"),
            "redis://r/0 is Redis 5",
            "offsets need version 6 or newer",
        ),
        (
            StoreUnavailable("redis://r/0 did not run the command (Error 111: refused): check the server"),
            "redis://r/0 did not run the command (Error 111: refused)",
            "check the server",
        ),
        (StoreError("redis://r/0 is odd"), "redis://r/0 is odd", "correct what the server reports, or offsets="),
        (StoreUnavailable("redis://r/0 is away"), "redis://r/0 is away", "start it, or correct offsets="),
    ],
)
def test_an_error_of_redis_is_split_in_the_same_way(
    error: Exception, problem: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = unusable(RedisStore("redis://r/0"), error, monkeypatch)
    assert (finding.problem, finding.fix) == (problem, fix)


@pytest.mark.parametrize(
    ("text", "problem", "fix"),
    [
        ("it is away: start it", "it is away", "start it"),
        ("it: is away: start it", "it: is away", "start it"),
        ("it is away", "it is away", "do it"),
        ("it is away (a: b)", "it is away (a: b)", "do it"),
        ("it is away: call reset(group, {partition: 1})", "it is away", "call reset(group, {partition: 1})"),
        ("it is away (a: [b (c: d)]): start it", "it is away (a: [b (c: d)])", "start it"),
        ("it is away (a :): start it", "it is away (a :)", "start it"),
        ("it is away: did you mean 'a: b'?", "it is away", "did you mean 'a: b'?"),
        ("the group's row isn't there: start it", "the group's row isn't there", "start it"),
        ('it is "away: far"', 'it is "away: far"', "do it"),
    ],
)
def test_a_text_is_divided_at_its_last_colon_outside_of_brackets_and_quotes(text: str, problem: str, fix: str) -> None:
    assert problem_and_fix(text, "do it") == (problem, fix)


def texts_of_errors(source: str) -> Iterator[str]:
    """The texts of all errors of kconsume that are made here, with `X` for each value."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(name), args=[ast.Constant(str(text)), *_]) if hasattr(errors, name):
                yield text
            case ast.Call(func=ast.Name(name), args=[ast.JoinedStr(pieces), *_]) if hasattr(errors, name):
                yield "".join(str(piece.value) if isinstance(piece, ast.Constant) else "X" for piece in pieces)


def with_two_fixes(texts: Iterable[str]) -> list[str]:
    return [text for text in texts if problem_and_fix(problem_and_fix(text, "")[0], "none")[1] != "none"]


def test_no_error_of_a_store_or_of_kafka_has_a_second_colon_in_front_of_its_fix() -> None:
    package = Path(kconsume.__path__[0])
    files = [file for room in ("backends", "_kafka") for file in (package / room).rglob("*.py")]
    texts = [text for file in files for text in texts_of_errors(file.read_text())]
    assert len(texts) > 100
    assert with_two_fixes(texts) == []


def test_control_a_second_colon_is_found() -> None:
    assert with_two_fixes(texts_of_errors('raise StoreError(f"{it} is away: start it ({why}): it is quick")'))
    assert not with_two_fixes(texts_of_errors('raise StoreError(f"{it} is away (since: {when}): start it")'))


def test_an_error_of_kconsume_is_split_into_problem_and_fix() -> None:
    (finding,) = of_cluster(
        [handler()], ClusterFacts({"orders": None}, missing={"orders": "topic 'orders' is not on h:1: create it"})
    )

    assert (finding.problem, finding.fix) == ("topic 'orders' is not on h:1", "create it")


def test_an_assignor_that_a_group_does_not_share_is_found_with_the_name_of_the_group() -> None:
    """The terminal shows the problem and the fix, and an app may have several groups."""
    facts = ClusterFacts({}, assignors={"shop": "range", "billing": "cooperative-sticky"})
    (finding,) = of_groups(SETTINGS, facts)

    assert (finding.level, finding.code, finding.about) == ("error", "assignor-not-shared", "group shop")
    assert "the members of group 'shop' use the assignor 'range', and this app uses 'cooperative-sticky'" in (
        finding.problem
    )


@pytest.mark.parametrize(
    ("brokers", "running", "expected"),
    [
        ("embedded://", False, [("note", "broker-inside")]),
        ("embedded://shop", False, [("note", "broker-not-running")]),
        ("embedded://shop", True, []),
        ("localhost:9092", True, []),
    ],
)
def test_an_embedded_broker_that_is_not_there_yet_is_noted(
    brokers: str, running: bool, expected: list[tuple[str, str]]
) -> None:
    assert codes(of_app(brokers, [handler()], running=running)) == expected


def test_an_app_without_a_handler_is_an_error() -> None:
    assert codes(of_app("localhost:9092", [])) == [("error", "no-handler")]


def test_what_the_client_says_is_passed_on() -> None:
    assert codes(of_client(ClientFacts('No such configuration property: "x"'))) == [("error", "client-refuses")]
    assert codes(of_client(ClientFacts(warnings=("linger.ms is ignored",)))) == [("warning", "client-ignores")]


def test_what_the_budgets_explain_better_the_client_does_not_say_again() -> None:
    refusal = "`max.poll.interval.ms`must be >= `session.timeout.ms`"

    assert codes(of_client(ClientFacts(refusal))) == []


def test_errors_come_first_and_each_thing_once() -> None:
    expiring = handler("kafka://", transaction=None, transactional_store=False)
    findings = ordered([*of_handlers([expiring, expiring]), *of_app("localhost:9092", [])])

    assert codes(findings) == [("error", "no-handler"), ("note", "kafka-offsets-expire")]

"""What `check` makes of the facts about a PostgreSQL."""

from __future__ import annotations

import msgspec
import pytest

from kconsume.cli.check.findings import Finding
from kconsume.cli.check.postgres import PostgresFacts, of_server

ADDRESS = "postgresql://db/shop"
GOOD = {"role": "shop", "server": 180001, "version": 1, "wanted": 1}


def found(**facts: object) -> dict[str, Finding]:
    told = msgspec.convert({**GOOD, **facts}, PostgresFacts)
    return {finding.code: finding for finding in of_server(ADDRESS, told, pool=8)}


def test_of_a_good_server_it_says_only_what_becomes_of_a_frozen_consumer() -> None:
    (finding,) = found().values()
    assert finding.level == "note"
    assert "ends its connection at once" in finding.problem


def test_what_becomes_of_a_frozen_consumer_of_another_role_is_told() -> None:
    of_its_own = found()["postgres-frozen"]
    assert (
        "of its own role. A backend of another role is ended by idle_in_transaction_session_timeout 1h"
        in of_its_own.problem
    )
    assert "grant pg_signal_backend to shop;" in of_its_own.fix
    assert "also for backends of other roles" in found(may_end_all=True)["postgres-frozen"].problem


def test_without_the_right_to_end_backends_the_handlers_limit_is_told() -> None:
    finding = found(may_end=False)["postgres-frozen"]
    assert finding.level == "warning"
    assert (
        "idle_in_transaction_session_timeout 30s; no handler may wait longer between two statements" in finding.problem
    )
    assert finding.fix.startswith("grant execute on function pg_terminate_backend")


@pytest.mark.parametrize(
    ("facts", "code", "level", "words"),
    [
        ({"server": 130010}, "postgres-too-old", "error", "PostgreSQL 13"),
        ({"standby": True}, "postgres-standby", "error", "standby"),
        ({"read_only": True}, "postgres-read-only", "note", "begins each transaction as read write"),
        ({"version": 0}, "postgres-schema", "note", "the first run brings them to version 1"),
        ({"version": 0, "may_create": False}, "postgres-schema", "error", "shop may not create tables"),
        ({"version": 1, "wanted": 2, "may_create": False}, "postgres-schema", "error", "has tables of version 1"),
        ({"version": 2}, "postgres-schema-newer", "error", "version 2"),
        ({"missing": ("delete on kconsume_offsets",)}, "postgres-rights", "error", "delete on kconsume_offsets"),
        ({"failed": "no such luck"}, "postgres-trial", "error", "no such luck"),
        ({"idle_limit": "5s"}, "postgres-idle-limit", "note", "idle for 5s"),
        ({"pooled": True}, "postgres-pooler", "note", "This works, also in transaction mode"),
        ({"synchronous_commit": "off"}, "postgres-asynchronous", "note", "offsets and effects together"),
        ({"connections": 9}, "postgres-connections", "error", "allows shop only 9"),
        (
            {"connections": 19},
            "postgres-connections",
            "warning",
            "two processes at once, as in a rolling update, do not fit",
        ),
    ],
)
def test_each_fact_that_matters_has_its_finding(facts: dict[str, object], code: str, level: str, words: str) -> None:
    finding = found(**facts)[code]
    assert (finding.level, finding.about) == (level, ADDRESS)
    assert words in finding.problem
    assert finding.fix


def test_of_a_server_that_is_too_old_nothing_else_is_said() -> None:
    assert list(found(server=130010, missing=("all",), standby=True)) == ["postgres-too-old"]

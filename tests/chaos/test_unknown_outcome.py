"""COMMIT, or the script of Redis, cut before it reaches the server, or its reply cut off: a worker cannot tell one from
the other (P1, P2)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from kconsume.testing.services import LocalRedis
from tests.chaos.effects import PostgresEffects, RedisEffects
from tests.chaos.fleet import Work, fleet
from tests.chaos.form import PATIENCE, TIMEOUT, form, printed_seed
from tests.chaos.proxy import Cut, CuttingProxy, Decide, pass_all
from tests.contract import redis_proxy as redis_proxies
from tests.contract.redis_proxy import RedisProxy

pytestmark = pytest.mark.timeout(TIMEOUT)

PARTITIONS = 4
RECORDS = form(short=4_000, long=24_000)
CUTS = form(short=30, long=200)
_QUEUED = b"\xa5RPUSH"
"""A command in a queue: in the request that applies it, and in no other, whatever the script is called."""
NO_ENCRYPTION = "sslmode=disable&gssencmode=disable"


def test_a_commit_of_which_the_outcome_is_unknown_is_neither_lost_nor_repeated(
    postgres_url: str, cutting_proxy: CuttingProxy, work: Work
) -> None:
    effects = handle_while_cutting(postgres_url, cutting_proxy, work)
    assert cutting_proxy.cut_before + cutting_proxy.cut_after == CUTS, "the work was done before the faults"
    assert min(cutting_proxy.cut_before, cutting_proxy.cut_after) > 0, "both outcomes are to be seen"
    assert (effects.rows, effects.distinct) == (RECORDS + PARTITIONS,) * 2, "0 lost, 0 twice"


def test_a_worker_that_runs_the_chunk_again_after_such_a_commit_repeats_records(
    postgres_url: str, cutting_proxy: CuttingProxy, work: Work
) -> None:
    """Without the fence, that is: with it, the offset in the same transaction would tell."""
    effects = handle_while_cutting(postgres_url, cutting_proxy, work, "--no-fence", "--retry-unknown")
    assert effects.rows > effects.distinct


@pytest.fixture
def redis_proxy() -> Iterator[RedisProxy]:
    """Before a server of the test's own: it passes on what it is sent to that port."""
    with LocalRedis() as server, RedisProxy(server.port, _QUEUED) as proxy:
        yield proxy


def test_a_script_of_which_the_outcome_is_unknown_is_neither_lost_nor_repeated(
    redis_proxy: RedisProxy, work: Work
) -> None:
    effects = apply_while_cutting(redis_proxy, work)
    assert redis_proxy.cuts == CUTS, "the work was done before the faults"
    assert min(redis_proxy.cut_before, redis_proxy.cut_after) > 0, "both outcomes are to be seen"
    assert (effects.rows, effects.distinct) == (RECORDS + PARTITIONS,) * 2, "0 lost, 0 twice"


def test_a_worker_that_sends_the_script_again_repeats_records(redis_proxy: RedisProxy, work: Work) -> None:
    """Without the fence, as above: the script compares the offset."""
    effects = apply_while_cutting(redis_proxy, work, "--no-fence", "--retry-unknown")
    assert effects.rows > effects.distinct


def apply_while_cutting(proxy: RedisProxy, work: Work, *flags: str) -> RedisEffects:
    effects, chance = RedisEffects(proxy.behind, proxy.url), printed_seed()

    def decide() -> redis_proxies.Cut:
        if proxy.cuts >= CUTS or chance.random() > 0.3:
            return redis_proxies.Cut.PASS
        return chance.choice([redis_proxies.Cut.BEFORE, redis_proxies.Cut.AFTER])

    job = work(effects.offsets, RECORDS, PARTITIONS, f"--chunk={RECORDS // CUTS // 4}", *flags)
    proxy.decide = decide
    with fleet(job) as workers:
        workers.grow()
        workers.await_work(lambda: effects.distinct == RECORDS, within=PATIENCE, what="every record has its effect")
        proxy.decide = lambda: redis_proxies.Cut.PASS
        workers.assert_liveness(PARTITIONS)
    print(f"cut before={proxy.cut_before} after={proxy.cut_after}")  # noqa: T201  (as the seed)
    return effects


def handle_while_cutting(url: str, proxy: CuttingProxy, work: Work, *flags: str) -> PostgresEffects:
    effects = PostgresEffects(url, f"{proxy.url}?{NO_ENCRYPTION}")
    proxy.decide = some_are_cut(printed_seed(), lambda: proxy.cut_before + proxy.cut_after < CUTS)
    with fleet(work(effects.offsets, RECORDS, PARTITIONS, f"--chunk={RECORDS // CUTS // 4}", *flags)) as workers:
        workers.grow()
        workers.await_work(lambda: effects.distinct == RECORDS, within=PATIENCE, what="every record has its effect")
        proxy.decide = pass_all
        workers.assert_liveness(PARTITIONS)
    print(f"commits={proxy.commits} cut before={proxy.cut_before} after={proxy.cut_after}")  # noqa: T201  (as the seed)
    return effects


def some_are_cut(chance: random.Random, wanted: Callable[[], bool]) -> Decide:
    """Every third COMMIT or so, claims' own included."""

    def decide(number: int) -> Cut:
        if not wanted() or chance.random() > 0.3:
            return Cut.PASS
        return chance.choice([Cut.BEFORE, Cut.AFTER])

    return decide

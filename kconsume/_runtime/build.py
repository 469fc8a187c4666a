"""Chooses from the plan of a handler how its lanes run, how fast, and what is done with a chunk.

Other modules run the chunks: plainly or in transactions, on threads or on the event loop. This module runs nothing.
"""

from __future__ import annotations

import re
import time
from functools import partial

from kconsume._handlers.compiled import Limit, Runner
from kconsume._handlers.rate import Limiter
from kconsume._runtime.lanes.event_loop import AsyncLanes
from kconsume._runtime.lanes.inline import InlineLanes
from kconsume._runtime.lanes.lane import Lane, Lanes, Work
from kconsume._runtime.lanes.pacing import Pace
from kconsume._runtime.lanes.reports import LaneReports
from kconsume._runtime.lanes.threads import ThreadLanes
from kconsume._runtime.output.publisher import Publisher, Relays
from kconsume._runtime.plan import HandlerPlan, SharedParts
from kconsume._runtime.processing.blocking_tx import AsyncBegin, off_the_loop
from kconsume._runtime.processing.dedup import Deduplication
from kconsume._runtime.processing.driver import LoopDriver, SavesAttempts, ThreadDriver
from kconsume._runtime.processing.plain import AsyncPlainAttempt, PlainAttempt
from kconsume._runtime.processing.rules import ChunkRules
from kconsume._runtime.processing.steps import SaveAttempts
from kconsume._runtime.processing.timeout import TimedCalls, cancelled_after
from kconsume._runtime.processing.transactional import AsyncTransactionalAttempt, TransactionalAttempt
from kconsume._runtime.thread_pool import ThreadPool
from kconsume.backends.base import OffsetStore, TransactionalStore
from kconsume.backends.capabilities import NotingStore, capabilities_of
from kconsume.failures.dead_letter import DeadLetterLimit
from kconsume.failures.retry_topics import Moment

BATCH = 1000
"""Records of one fetch, and of one chunk unless the user says `chunk=`."""
DEFAULT_WORKERS = 8
_STAMP = 128
"""Size of the header that says from which record an outgoing record came: bytes without the name of the group."""
LOOP_SLICE = 0.01
"""Seconds that a handler may keep the event loop, which it shares with others."""
TRANSACTION_SLICE = 0.1
"""Seconds of a transaction on a server: twice an ordinary slice, because the round trips of a transaction cost as much
as dozens of records. In longer transactions, handlers that write to the same rows would wait for each other."""
_TRIED = re.compile(r"tried=(\d{1,19})/(\d{1,9})")


def pace_of(handler: HandlerPlan, store: OffsetStore) -> Pace:
    """The largest slice of this handler, and how long a slice may take."""
    limit = handler.options.chunk or BATCH
    if handler.binding.is_async and not handler.in_transactions:
        return Pace(limit, waits=True, target=LOOP_SLICE)
    if _waits_for_a_server(handler, store):
        return Pace(limit, waits=True, target=TRANSACTION_SLICE)
    return Pace(limit, waits=handler.waits)


def _waits_for_a_server(handler: HandlerPlan, store: OffsetStore) -> bool:
    """Whether several transactions of the handler can be open at once. Then one can use the interpreter while the
    others wait for the server."""
    transactional = capabilities_of(store).transactional
    return handler.in_transactions and transactional is not None and transactional.parallel != 1


def lanes_for(handler: HandlerPlan, store: OffsetStore, reports: LaneReports, shared: SharedParts) -> Lanes:
    """Where the chunks of this handler run: on the owner thread, on worker threads, or on the event loop."""
    name, most = f"kconsume-{handler.binding.name}", most_workers(handler, store)
    if handler.executor == "inline":
        return InlineLanes(reports)
    if handler.executor == "async":
        return AsyncLanes(reports, name, most, shared.handler_loop)
    return ThreadLanes(reports, name, most)


def most_workers(handler: HandlerPlan, store: OffsetStore) -> int:
    """How many lanes of the handler run at once: as many as the user asked for, else as many as the store allows."""
    useful, transactional = DEFAULT_WORKERS, capabilities_of(store).transactional
    if handler.in_transactions and transactional is not None:
        useful = min(useful, transactional.parallel or useful)
    return handler.options.concurrency or useful


def work_for(
    handler: HandlerPlan, store: OffsetStore, group: str, shared: SharedParts, relay: Relays | None = None
) -> Work:
    """What is done with the chunks of a handler: plainly or in transactions, on threads or on the event loop.

    Args:
        handler: what to run.
        store: where the offsets are kept.
        group: the consumer group.
        shared: what the handlers of the app share.
        relay: sends the rows of the outbox, if the store has one.
    """
    relay = relay if handler.produces else None
    rules = _rules_for(handler, store, group, relay)
    publisher = _publisher_for(handler, shared, relay)
    if handler.in_transactions:
        return _transactional_work(handler, store, group, shared, rules, publisher, stamped=relay is not None)
    most_bytes = shared.most_bytes - (len(group) + _STAMP if relay is not None else 0)
    binding, options = handler.binding, (shared.resources, handler.wraps, most_bytes)
    if binding.is_async:
        run = binding.async_runner(*options, limit=_limit(handler))
        return LoopDriver(rules, AsyncPlainAttempt(run, binding.batched, publisher))
    return ThreadDriver(
        rules, PlainAttempt(_timed(binding.runner(*options), handler, shared), binding.batched, publisher)
    )


def _rules_for(handler: HandlerPlan, store: OffsetStore, group: str, relay: Relays | None) -> ChunkRules:
    dead_letter, rate = handler.policy.dead_letter, handler.options.rate
    limit = None
    if dead_letter is not None and dead_letter.limit is not None:
        limit = DeadLetterLimit(dead_letter.limit, dead_letter.window, time.monotonic)
    return ChunkRules(
        handler.binding,
        handler.policy,
        None if rate is None else Limiter(rate),
        clock=Moment.now,
        stores=handler.in_transactions,
        group=group,
        dead_letter_limit=limit,
        outbox_is_full=None if relay is None else relay.is_full,
        retry_chain=handler.retry_chain,
        saves_attempts=handler.in_transactions and capabilities_of(store).noting is not None,
    )


def _publisher_for(handler: HandlerPlan, shared: SharedParts, relay: Relays | None) -> Publisher | None:
    dead_letter = handler.policy.dead_letter
    if not handler.binding.sends and dead_letter is None and handler.retry_chain is None:
        return None
    letters_to, is_real = shared.dead, shared.dead is None
    if letters_to is None:
        letters_to = (shared.letter_producer if handler.hands_letters_over else None) or shared.producer
    return Publisher(
        shared.producer,
        dead_letter,
        letters_to,
        shared.most_bytes,
        relay=relay,
        retries_letters=is_real,
    )


def _transactional_work(
    handler: HandlerPlan,
    store: OffsetStore,
    group: str,
    shared: SharedParts,
    rules: ChunkRules,
    publisher: Publisher | None,
    *,
    stamped: bool,
) -> Work:
    """
    Args:
        stamped: whether records that the handler sends get the header that says which record they came from.
    """
    offers, binding = capabilities_of(store), handler.binding
    transactional = offers.transactional
    assert transactional is not None  # checked when the handler was decorated
    save_attempts = None if offers.noting is None else _saves_attempts_in(offers.noting, group)
    own_topics = {*handler.retry_topics, *handler.redrive_topics(group)}
    dedup = None
    if handler.outbox and (own_topics or handler.drops_repeats):
        dedup = Deduplication(own_topics, handler.drops_repeats)
    gives_tx = binding.transaction is not None
    by_record = transactional.by_record and gives_tx
    options = (shared.resources, handler.wraps, shared.most_bytes - (len(group) + _STAMP if stamped else 0))
    if binding.is_async:
        begin = _awaited(transactional, binding.transaction, shared.handler_loop.thread_pool)
        run_async = binding.async_runner(*options, by_record=by_record, stamped=stamped, limit=_limit(handler))
        on_loop = AsyncTransactionalAttempt(
            run_async, binding.batched, begin, group, publisher, gives_tx=gives_tx, dedup=dedup
        )
        return LoopDriver(rules, on_loop, save_attempts)
    waits_in_handler = (binding.sends and not stamped) or handler.options.timeout is not None
    run = _timed(binding.runner(*options, by_record=by_record, stamped=stamped), handler, shared)
    attempt = TransactionalAttempt(
        run,
        binding.batched,
        transactional,
        group,
        publisher,
        gives_tx=gives_tx,
        waits_in_handler=waits_in_handler,
        dedup=dedup,
    )
    return ThreadDriver(rules, attempt, save_attempts)


def _timed(run: Runner, handler: HandlerPlan, shared: SharedParts) -> Runner:
    if handler.options.timeout is None:
        return run
    return TimedCalls(
        run, handler.binding.name, handler.options.timeout, handler.binding.batched, shared.handler_loop.thread_pool
    )


def _limit(handler: HandlerPlan) -> Limit | None:
    seconds = handler.options.timeout
    return None if seconds is None else partial(cancelled_after, seconds, handler.binding.name)


def _saves_attempts_in(store: NotingStore, group: str) -> SavesAttempts:
    def save(lane: Lane, step: SaveAttempts) -> None:
        store.note(group, lane.partition, lane.epoch, f"tried={step.offset}/{step.attempts}")

    return save


def tried_before(metadata: str) -> tuple[int, int] | None:
    """Read from the metadata of a row which record an earlier owner has tried (its offset), and how often."""
    found = _TRIED.fullmatch(metadata)
    return None if found is None else (int(found[1]), int(found[2]))


def _awaited(store: TransactionalStore, wanted: type | None, thread_pool: ThreadPool | None) -> AsyncBegin:
    """Transactions for the event loop: the async ones of the store, or blocking ones on another thread."""
    awaitable = capabilities_of(store).async_transactional
    if awaitable is not None:
        own = awaitable.async_connection_types
        if (own and wanted is None) or wanted in own:
            return awaitable.async_transaction
    return off_the_loop(store, thread_pool)

"""The work of a handler, fitted to its plan: how its lanes are run, how fast, and what is done with a chunk.

Chooses between forms that are written elsewhere: plainly or in transactions, on threads or on the event loop. Nothing
is run here.
"""

from __future__ import annotations

import re
import time
from functools import partial

from kconsume.backends.abc import (
    AsyncTransactionalStore,
    NotingStore,
    OffsetStore,
    TransactionalStore,
)
from kconsume.failures.dead_letter import Gauge
from kconsume.rate import Limiter
from kconsume.runner import Limit, Runner
from kconsume.runtime.async_lanes import AsyncLanes
from kconsume.runtime.budget import Pace
from kconsume.runtime.course import Course
from kconsume.runtime.hands import Hands
from kconsume.runtime.home import Home
from kconsume.runtime.intake import Intake
from kconsume.runtime.lanes import InlineLanes, Lane, Lanes, Outcomes, ThreadLanes, Work
from kconsume.runtime.mail import Mail, Relays
from kconsume.runtime.off_loop import AsyncBegin, off_the_loop
from kconsume.runtime.ownership import Ownership
from kconsume.runtime.plans import Equipment, HandlerPlan
from kconsume.runtime.steps import Note
from kconsume.runtime.timing import Timed, cancelled_after
from kconsume.runtime.work import (
    InTransactions,
    InTransactionsAsync,
    LoopWork,
    Notes,
    Plainly,
    PlainlyAsync,
    ThreadWork,
)

BATCH = 1000
DEFAULT_WORKERS = 8
_STAMP = 128
"""Bytes of the header that says where a record came from, beside the group's name."""
LOOP_SLICE = 0.01
"""Seconds that a handler may keep an event loop to itself; others live there too."""
TRANSACTION_SLICE = 0.1
"""Seconds of a transaction on a server: twice an ordinary slice, for its round trips cost as much as dozens of records.
Were it longer, those that write to the same rows would stand in each other's way."""
_TRIED = re.compile(r"tried=(\d{1,19})/(\d{1,9})")


def pace_of(handler: HandlerPlan, store: OffsetStore, home: Home) -> Pace:
    limit = handler.chunk or BATCH
    if handler.plainly_async:  # one in a transaction waits all the time
        return Pace(limit, waits=handler.waits or not home.lends, target=LOOP_SLICE)
    if _waits_for_a_server(handler, store):
        return Pace(limit, waits=True, target=TRANSACTION_SLICE)
    return Pace(limit, waits=handler.waits)


def _waits_for_a_server(handler: HandlerPlan, store: OffsetStore) -> bool:
    """Whether several of its transactions can be under way, so that one has the interpreter while others wait."""
    return handler.in_transactions and isinstance(store, TransactionalStore) and store.parallel != 1


def lanes_for(
    handler: HandlerPlan, store: OffsetStore, outcomes: Outcomes, ownership: Ownership, equipment: Equipment
) -> Lanes:
    name, most = f"kconsume-{handler.binding.name}", most_workers(handler, store)
    if handler.executor == "inline":
        return InlineLanes(outcomes)
    if handler.executor == "async":
        return AsyncLanes(outcomes, name, most, equipment.home)
    return ThreadLanes(outcomes, name, most, ownership)


def most_workers(handler: HandlerPlan, store: OffsetStore) -> int:
    """As many as asked for; by default as many as can do something side by side."""
    useful = DEFAULT_WORKERS
    if handler.in_transactions and isinstance(store, TransactionalStore):
        useful = min(useful, store.parallel or useful)
    return handler.concurrency or useful


def work_for(
    handler: HandlerPlan, store: OffsetStore, group: str, equipment: Equipment, relay: Relays | None = None
) -> Work:
    """What is done with the chunks of a handler: plainly or in transactions, on threads or on the event loop."""
    binding, batched = handler.binding, handler.binding.batched
    relay = relay if handler.produces else None
    limiter = None if handler.rate is None else Limiter(handler.rate)
    in_transactions, dead_letter = handler.in_transactions, handler.policy.dead_letter
    gauge = None
    if dead_letter is not None and dead_letter.limit is not None:
        gauge = Gauge(dead_letter.limit, dead_letter.window, time.monotonic)
    course = Course(
        binding,
        handler.policy,
        limiter,
        stores=in_transactions,
        group=group,
        gauge=gauge,
        is_full=None if relay is None else relay.is_full,
        ladder=handler.ladder,
        notes=in_transactions and isinstance(store, NotingStore),
    )
    notes = _notes_in(store, group) if isinstance(store, NotingStore) else None
    mail = None
    if binding.sends or dead_letter is not None or handler.ladder is not None:
        letters_to, holds = equipment.dead, equipment.dead is None
        if letters_to is None:
            letters_to = (equipment.letter_outlet if handler.hands_letters_over else None) or equipment.outlet
        most = equipment.most_bytes
        mail = Mail(equipment.outlet, dead_letter, letters_to, most, relay=relay, holds=holds)
    stamps = relay is not None
    most_bytes = equipment.most_bytes - (len(group) + _STAMP if stamps else 0)
    furnished = (equipment.resources, handler.wraps, most_bytes)
    if not in_transactions:
        if binding.is_async:
            return LoopWork(
                course, PlainlyAsync(binding.async_runner(*furnished, limit=_limit(handler)), batched, mail)
            )
        return ThreadWork(course, Plainly(_timed(binding.runner(*furnished), handler, equipment), batched, mail))
    assert isinstance(store, TransactionalStore)  # checked when the handler was decorated
    own = {*handler.retry_topics, *handler.redrive_topics(group)}
    intake = Intake(own, handler.drops_repeats) if handler.outbox and (own or handler.drops_repeats) else None
    lends = binding.transaction is not None
    by_record = store.by_record and lends
    if binding.is_async:
        begin = _awaited(store, binding.transaction, equipment.home.hands)
        awaited = binding.async_runner(*furnished, by_record=by_record, stamped=stamps, limit=_limit(handler))
        on_loop = InTransactionsAsync(awaited, batched, begin, group, mail, lends=lends, intake=intake)
        return LoopWork(course, on_loop, notes)
    waits_inside = (binding.sends and not stamps) or handler.timeout is not None
    runner = _timed(binding.runner(*furnished, by_record=by_record, stamped=stamps), handler, equipment)
    attempt = InTransactions(runner, batched, store, group, mail, lends=lends, waits_inside=waits_inside, intake=intake)
    return ThreadWork(course, attempt, notes)


def _timed(run: Runner, handler: HandlerPlan, equipment: Equipment) -> Runner:
    if handler.timeout is None:
        return run
    return Timed(run, handler.binding.name, handler.timeout, handler.binding.batched, equipment.home.hands)


def _limit(handler: HandlerPlan) -> Limit | None:
    return None if handler.timeout is None else partial(cancelled_after, handler.timeout, handler.binding.name)


def _notes_in(store: NotingStore, group: str) -> Notes:
    def note(lane: Lane, note: Note) -> None:
        store.note(group, lane.partition, lane.epoch, f"tried={note.offset}/{note.attempts}")

    return note


def tried_before(metadata: str) -> tuple[int, int] | None:
    """Of a record, what an earlier owner has noted."""
    found = _TRIED.fullmatch(metadata)
    return None if found is None else (int(found[1]), int(found[2]))


def _awaited(store: TransactionalStore, wanted: type | None, hands: Hands | None) -> AsyncBegin:
    """Transactions for an event loop: the store's own, or those that block, on another thread."""
    if isinstance(store, AsyncTransactionalStore):
        own = store.async_connection_types
        if (own and wanted is None) or wanted in own:
            return store.async_transaction
    return off_the_loop(store, hands)

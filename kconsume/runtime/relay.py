"""Sends what handlers have left in the outbox: partition by partition, in order, and deletes what is confirmed.

    COMMIT ─► wrote ─► read ─► sent ─► confirmed ─► deleted ─► read …

One thread a consumer. Of a partition one lot is under way at a time: what is read next stands behind it. So the first
time that a row reaches its topic, all rows before it have, whoever sent them; what a killed owner had sent and not
deleted is sent again by the next one. Only what the broker refuses of a lot may be passed by what it takes of it. The
next lots are then smaller, down to one row, for a broker refuses records by the batch; a row that is refused alone
holds all behind it. Its partition rests for a while, and the others go on.

What is nobody's (`outbox_table.NOBODYS`: a person's own rows) is looked for every second, and sent by one app.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import cast

from kconsume.backends.abc import OutboxStore
from kconsume.backends.outbox_table import LEASE, NOBODYS, Posted
from kconsume.errors import KconsumeError
from kconsume.outlet import Delivery, Outlet
from kconsume.records import Partition
from kconsume.runtime.budget import Deadline

_log = logging.getLogger("kconsume.outbox")

FULL = 10_000
"""Rows of a partition that are not confirmed: its handler waits until there are fewer."""
LOT = 1000
"""Rows of a partition that are read and sent at once, at most; fewer until it is known how large they are."""
_FIRST_LOT = 100
_LOT_BYTES = 8_000_000
"""What is read is in memory, and in the producer's queue, of which each partition should have a part."""
_BEAT = 0.1
"""Seconds: after a lot that was not full, more rows are waited for until the next beat, which is the same for all
partitions. Each read and each deletion costs as much as many rows, and so they have them in common."""
_TOGETHER = 0.01
"""Seconds: when a lot is answered, those of other partitions that were sent with it are as well, and are deleted with
it."""
_EVERY = 1.0
"""Seconds between two looks for what is nobody's."""
_LONGEST_REST = 30.0
_SAID_EVERY = 30.0
_PATIENCE = 2.0
"""Seconds without anything confirmed, after which who leaves does not wait any longer."""
_FORGET_EVERY = 3600.0
_clock = time.monotonic


class _Strand:
    """What is known of one partition's rows."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.pending = 0
        """Rows that were written here, and that are not deleted yet."""
        self.unread = True
        """Whether there may be others, of an earlier owner."""
        self.lot: Sequence[Posted] = ()
        """What is under way."""
        self.sending: Future[Delivery] | None = None
        self.sent_at = 0.0
        self.confirmed: list[int] = []
        """Sent, and to be deleted before anything else is read."""
        self.width = _FIRST_LOT
        """Rows that are read and sent at once."""
        self.due_at = 0.0
        self.tries = 0
        self.said: str | None = None
        self.said_at = 0.0
        self.progress = 0
        """Grows with each lot that is sent, and each row that is deleted."""
        self.leaving = False
        """It is another's now: what is under way is seen to its end, and nothing else is sent."""

    @property
    def clear(self) -> bool:
        return not (self.pending or self.unread or self.is_under_way)

    @property
    def is_under_way(self) -> bool:
        return bool(self.lot or self.confirmed)

    @property
    def is_answered(self) -> bool:
        return self.sending is not None and self.sending.done()

    def is_ready(self, now: float) -> bool:
        return not self.lot and (self.pending > 0 or self.unread or bool(self.confirmed)) and now >= self.due_at

    def went_well(self) -> None:
        self.tries, self.said = 0, None
        self.width = min(2 * self.width, LOT)

    def rest(self) -> float:
        self.tries += 1
        seconds = min(_LONGEST_REST, 0.5 * 2.0**self.tries)
        self.due_at = _clock() + seconds
        return seconds

    def is_news(self, why: str) -> bool:
        """Whether it is to be said: what was a moment ago is not said again."""
        now = _clock()
        if why == self.said and now - self.said_at < _SAID_EVERY:
            return False
        self.said, self.said_at = why, now
        return True


class Relay:
    """The outbox of one consumer."""

    def __init__(self, store: OutboxStore, group: str, outlet: Outlet, owner: str) -> None:
        self._store = store
        self._group = group
        self._outlet = outlet
        self._owner = owner
        self._guard = threading.Lock()
        self._news = threading.Condition(self._guard)
        self._strands: dict[Partition, _Strand] = {NOBODYS: _Strand(0)}
        self._closing = self._over = False
        self._said_at = 0.0
        self._renew_at = 0.0
        self._forget_at = _clock() + _FORGET_EVERY
        self._thread = threading.Thread(target=self._run, name=f"kconsume-relay-{group}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # From any thread

    def wrote(self, partition: Partition, rows: int) -> None:
        """A transaction with so many rows has committed."""
        with self._guard:
            if (strand := self._strands.get(partition)) is not None and not strand.leaving:
                strand.pending += rows
                self._news.notify_all()

    def is_full(self, partition: Partition) -> bool:
        """Whether so much is unsent that no more should be written."""
        strand = self._strands.get(partition)
        return strand is not None and strand.pending >= FULL

    def open(self, partition: Partition, epoch: int) -> None:
        """It is ours under this epoch; an earlier owner may have left something."""
        with self._guard:
            strand = self._strands.setdefault(partition, _Strand(epoch))
            strand.epoch, strand.unread, strand.leaving = epoch, True, False
            self._news.notify_all()

    def finish(self, partitions: Iterable[Partition], budget: Deadline) -> None:
        """They go to others: send what is left, as long as that goes well and the budget lasts."""
        with self._guard:
            leaving = {p: strand for p in partitions if (strand := self._strands.get(p)) is not None}
            while not budget.passed and not all(strand.clear for strand in leaving.values()):
                if not self._goes_on(leaving.values(), min(_PATIENCE, budget.left)):
                    break
            for strand in leaving.values():
                strand.leaving, strand.pending, strand.unread = True, 0, False
            self._forget_those_that_left()

    def _forget_those_that_left(self) -> None:
        for partition in [p for p, s in self._strands.items() if s.leaving and not s.is_under_way]:
            del self._strands[partition]

    def _goes_on(self, strands: Collection[_Strand], seconds: float) -> bool:
        """Whether something of them was confirmed within that time."""
        before = sum(strand.progress for strand in strands)
        return self._news.wait_for(lambda: sum(strand.progress for strand in strands) != before, seconds)

    def close(self, deadline: Deadline) -> None:
        if self._thread.ident is None:
            return
        with self._guard:
            self._closing = True
            partitions, strays = [p for p in self._strands if p != NOBODYS], self._strands[NOBODYS]
        self.finish(partitions, deadline.part(0.5))
        with self._guard:
            self._news.wait_for(lambda: not strays.is_under_way, min(_PATIENCE, deadline.part(0.5).left))
            self._over = True
            self._news.notify_all()
        self._thread.join(min(_PATIENCE, deadline.left))

    # The relay's own thread

    def _run(self) -> None:
        while True:
            with self._guard:
                self._news.wait_for(self._has_work, self._calm_for())
                if any(strand.is_answered for strand in self._strands.values()):
                    self._news.wait_for(self._is_all_answered, _TOGETHER)
                if self._over:
                    return
                strands = dict(self._strands)
            try:
                now = _clock()
                answered = {p: s for p, s in strands.items() if s.is_answered}
                self._collect(answered)
                ready = {p: s for p, s in strands.items() if s.is_ready(now)}
                try:
                    self._delete({**answered, **ready})
                    self._send(ready)
                    self._look_after(strands, now)
                except KconsumeError as error:
                    self._rest({**answered, **ready}, str(error))
            except Exception:  # noqa: BLE001  (said; the rows are still there)
                _log.exception("the relay of group %s stumbled, and goes on", self._group)
                time.sleep(_EVERY)

    def _has_work(self) -> bool:
        now = _clock()
        return self._over or any(s.is_answered or s.is_ready(now) for s in self._strands.values())

    def _is_all_answered(self) -> bool:
        return self._over or all(s.sending is None or s.is_answered for s in self._strands.values())

    def _calm_for(self) -> float:
        """Until a strand that rests is due; at most until the next look around."""
        now = _clock()
        return min([_EVERY, *(s.due_at - now for s in self._strands.values() if s.due_at > now)])

    def _collect(self, answered: Mapping[Partition, _Strand]) -> None:
        for partition, strand in answered.items():
            assert strand.sending is not None
            delivery, lot = strand.sending.result(), strand.lot
            strand.confirmed += [row.number for row, done in zip(lot, delivery.confirmed, strict=True) if done]
            strand.sending, strand.lot = None, ()
            if delivery.why is None:
                strand.went_well()
                continue
            strand.unread = not strand.leaving
            strand.width = max(1, len(lot) // 2)
            if len(lot) == 1:
                self._rest({partition: strand}, delivery.why)

    def _delete(self, strands: Mapping[Partition, _Strand]) -> None:
        """What is confirmed, of all partitions at once."""
        done = {p: s for p, s in strands.items() if s.confirmed}
        for group, chosen in ((self._group, done.keys() - {NOBODYS}), ("", done.keys() & {NOBODYS})):
            if chosen:
                self._store.delivered(group, {p: done[p].confirmed for p in chosen})
        with self._guard:
            for strand in done.values():
                strand.pending = max(0, strand.pending - len(strand.confirmed))
                strand.progress += len(strand.confirmed)
                strand.confirmed = []
                if strand.pending < strand.width:
                    strand.due_at = max(strand.due_at, _next_beat(_clock()))
            self._forget_those_that_left()
            if done:
                self._news.notify_all()

    def _send(self, ready: Mapping[Partition, _Strand]) -> None:
        with self._guard:
            asked = {p: s for p, s in ready.items() if not s.leaving and (s.pending or s.unread)}
            if self._closing and (strays := asked.pop(NOBODYS, None)) is not None:
                strays.unread = False
            known = {p: s.pending for p, s in asked.items()}
            for strand in asked.values():
                strand.unread = False  # who opens it while we read means what is there after that
        try:
            lots = self._read(asked)
            for partition, strand in asked.items():
                self._send_lot(partition, strand, lots.get(partition, ()), known[partition])
        except BaseException:
            for strand in asked.values():
                strand.unread = True
            raise

    def _read(self, asked: Mapping[Partition, _Strand]) -> dict[Partition, list[Posted]]:
        lots: dict[Partition, list[Posted]] = {}
        for width in {s.width for p, s in asked.items() if p != NOBODYS}:
            epochs = {p: s.epoch for p, s in asked.items() if p != NOBODYS and s.width == width}
            lots.update(self._store.posted(self._group, epochs, width))
        if NOBODYS in asked:
            self._renew_at = _clock() + LEASE / 3
            lots[NOBODYS] = self._store.strays(self._owner, asked[NOBODYS].width)
        return lots

    def _send_lot(self, partition: Partition, strand: _Strand, rows: Sequence[Posted], known: int) -> None:
        lot, has_more = _light_enough(rows), len(rows) == strand.width
        with self._guard:
            if strand.leaving or (self._closing and partition == NOBODYS):
                return
            if has_more:
                strand.pending, strand.unread = max(strand.pending, len(rows)), True
            else:
                # All that was committed before the read is in it. What was written since stands behind it; or it was
                # committed before, and told after: then one look more finds nothing.
                strand.pending += len(rows) - known
            strand.unread = strand.unread or len(lot) < len(rows) or partition == NOBODYS
            strand.lot = lot
            strand.progress += 1
            self._news.notify_all()
        if not lot:
            strand.tries, strand.said = 0, None
        if partition == NOBODYS and not has_more:
            strand.due_at = _clock() + _EVERY
        if lot:
            strand.sent_at = _clock()
            strand.width = strand.width if len(lot) == len(rows) else len(lot)
            try:
                strand.sending = self._outlet.deliver_each([row.outgoing for row in lot])
            except BaseException:
                strand.lot = ()
                raise
            strand.sending.add_done_callback(lambda _: self._wake())

    def _wake(self) -> None:
        with self._guard:
            self._news.notify_all()

    def _rest(self, strands: Mapping[Partition, _Strand], why: str) -> None:
        resting = {p: s for p, s in strands.items() if not s.lot}
        seconds = max((strand.rest() for strand in resting.values()), default=0.0)
        news = [p for p, s in resting.items() if (p != NOBODYS or s.pending) and s.is_news(why)]
        if news:
            where = f"partitions={len(news)}" if len(news) > 1 else _place_of(news[0])
            rows = sum(resting[p].pending for p in news)
            _log.warning("outbox waits %s rows=%d again_in=%.1fs cause=%s", where, rows, seconds, why)

    def _look_after(self, strands: Mapping[Partition, _Strand], now: float) -> None:
        """What takes long is said, and stays ours; what was taken in long ago is forgotten."""
        slow = [p for p, s in strands.items() if s.sending is not None and now - s.sent_at > _SAID_EVERY]
        if slow and now - self._said_at > _SAID_EVERY:
            self._said_at = now
            rows = sum(strands[p].pending for p in slow)
            _log.warning("outbox waits partitions=%d rows=%d cause=the brokers do not confirm them", len(slow), rows)
        if strands[NOBODYS].lot and now >= self._renew_at:
            self._renew_at = now + LEASE / 3
            self._store.strays(self._owner, 1)  # nobody else sends them while they are under way
        if now >= self._forget_at:
            self._forget_at = now + _FORGET_EVERY
            self._store.forget_origins()


def _next_beat(now: float) -> float:
    return (now // _BEAT + 1) * _BEAT


def _light_enough(rows: Sequence[Posted]) -> Sequence[Posted]:
    """As many of the first as are to be sent at once: one at least."""
    size = 0
    for index, row in enumerate(rows):
        size += len(cast("bytes | None", row.outgoing.value) or b"")
        if index and size > _LOT_BYTES:
            return rows[:index]
    return rows


def _place_of(partition: Partition) -> str:
    return "nobody's" if partition == NOBODYS else f"partition={partition}"

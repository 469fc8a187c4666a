"""A handler over a chunk of records: the only place that calls user code.

A chunk is run in slices that `Pace` sizes by the handler's speed; each slice reports how far it came. Plainly,
a record is finished when its handler returns. In transactions, a slice of records shares one transaction of
the store, in which the offset is advanced last; a slice that fails is undone and its records are run
again one by one, which names the culprit and gives the others their effects.

What happens to a record that fails is the policy's decision (`kconsume.failures`); here it is carried out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from kconsume.backends.abc import TransactionalStore
from kconsume.errors import Fenced, StoreUnavailable
from kconsume.failures.policy import Policy, Verdict
from kconsume.handler import Binding, Halt
from kconsume.records import Message
from kconsume.runtime.lanes import Chunk, Ejected, Failure, Lane, Progress, Report

_log = logging.getLogger("kconsume.failures")
_clock = time.perf_counter


class _Undo(Exception):
    """Rolls a transaction back without showing the store an error that is the handler's."""


class PlainWork:
    """Handlers without a transaction: finished when they return."""

    def __init__(self, binding: Binding, policy: Policy) -> None:
        self._binding = binding
        self._policy = policy

    def __call__(self, lane: Lane, chunk: Chunk, report: Report, /) -> None:
        run, stop, pace, messages = self._binding.run, lane.stop, lane.pace, chunk.messages
        at, count = 0, len(messages)
        while at < count and not stop:
            part = _slice(messages, at, pace.size)
            began = _clock()
            halt = run(part, stop, None, lane.scope)
            done = len(part) if halt is None else part.index(halt.message)
            if done:
                pace.took(done, _clock() - began)
                at += done
                last = part[done - 1]
                report(Progress(lane, chunk.first, last.offset() + 1, done, leader_epoch=last.leader_epoch()))
            if halt is not None and halt.error is not None:
                error = self._binding.explain(halt.message, halt.error)
                if self._policy.verdict(error) is not Verdict.SKIP:
                    return _fail(lane, self._binding, halt.message, error, report)
                at += 1
                _log_skip(halt.message, error)
                report(Progress(lane, chunk.first, halt.message.offset() + 1, 0, 1, halt.message.leader_epoch()))
        return None


class TransactionalWork:
    """Handlers that write through the store's transaction: their writes and the offset commit together."""

    def __init__(self, binding: Binding, policy: Policy, store: TransactionalStore, group: str) -> None:
        self._binding = binding
        self._policy = policy
        self._store = store
        self._group = group

    def __call__(self, lane: Lane, chunk: Chunk, report: Report, /) -> None:
        pace, messages = lane.pace, chunk.messages
        at, count, isolated = 0, len(messages), 0
        while at < count and not lane.stop:
            part = _slice(messages, at, 1 if at < isolated else pace.size)
            began = _clock()
            try:
                done, failed = self._transact(lane, part)
                if failed is not None and len(part) > 1:
                    isolated = at + len(part)
                    continue
                skipped = failed is not None
                if failed is not None:
                    error = self._binding.explain(part[0], failed)
                    if self._policy.verdict(error) is not Verdict.SKIP:
                        return _fail(lane, self._binding, part[0], error, report)
                    _log_skip(part[0], error)
                    done = self._pass_over(lane, part[0])
            except Exception as error:  # noqa: BLE001  (whatever the store raised; the claim finds out what it means)
                lane.brake("store")
                return report(Ejected(lane, error))
            if done:
                pace.took(done, _clock() - began)
                at += done
                counts = (0, 1) if skipped else (done, 0)
                epoch = part[done - 1].leader_epoch()
                report(Progress(lane, chunk.first, lane.stored, *counts, leader_epoch=epoch, stored=True))
        return None

    def _transact(self, lane: Lane, part: Sequence[Message]) -> tuple[int, BaseException | None]:
        """Run a slice in one transaction; how many records were committed, or why none were."""
        halt: Halt | None = None
        try:
            with self._store.transaction(self._group, lane.partition, lane.epoch) as tx:
                halt = self._binding.run(part, lane.stop, tx.connection, lane.scope)
                if halt is not None and halt.error is not None:
                    raise _Undo
                done = len(part) if halt is None else part.index(halt.message)
                upto = part[done - 1].offset() + 1 if done else lane.stored
                if done:
                    tx.advance(lane.stored, upto, part[done - 1].leader_epoch())
        except _Undo:
            return 0, None if halt is None else halt.error
        except (Fenced, StoreUnavailable):
            raise
        except BaseException as error:  # noqa: BLE001  (a transaction misused, or a constraint checked at COMMIT)
            return 0, error
        lane.stored = upto
        return done, None

    def _pass_over(self, lane: Lane, message: Message) -> int:
        """Advance past a record that is skipped, in a transaction with nothing else in it."""
        upto = message.offset() + 1
        with self._store.transaction(self._group, lane.partition, lane.epoch) as tx:
            tx.advance(lane.stored, upto, message.leader_epoch())
        lane.stored = upto
        return 1


def _slice(messages: Sequence[Message], at: int, size: int) -> Sequence[Message]:
    return messages if at == 0 and size >= len(messages) else messages[at : at + size]


def _log_skip(message: Message, error: BaseException) -> None:
    place = (message.topic(), message.partition(), message.offset())
    _log.warning("skipped record=%s/%d@%d cause=%s: %s", *place, type(error).__name__, error)


def _fail(lane: Lane, binding: Binding, message: Message, error: BaseException, report: Report) -> None:
    lane.brake("failed")
    report(Failure(lane, binding.name, message, error))

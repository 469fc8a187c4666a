"""The rules of a chunk: what to run next, and what its result means.

`ChunkRules.steps` is a generator. It yields a `Step`, gets the `StepResult`, and reports the progress of the chunk. A
driver carries the steps out, on a thread or on an event loop (`_runtime/processing/driver.py`), so both have the same
decisions. Pure: no I/O, no log, and only the clock that is passed in.

Records run in slices that `Pace` sizes by the handler's speed. A batch runs as a whole. If a slice fails and the failed
record is not known, the slice is halved until it is known.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import SupportsIndex

from kconsume._handlers.binding import Binding
from kconsume._handlers.rate import Limiter
from kconsume._runtime.lanes.lane import Chunk, Lane
from kconsume._runtime.lanes.reports import Failure, MovedToLogEnd, Progress, SendReport, StoreRefused
from kconsume._runtime.output.letter_batch import LetterBatch
from kconsume._runtime.processing.failure_decisions import FailureDecisions
from kconsume._runtime.processing.steps import (
    CallHandler,
    LogRetry,
    MoveToLogEnd,
    SaveAttempts,
    SkipRecords,
    Step,
    StepResult,
    Steps,
    Wait,
)
from kconsume.errors import BatchError, InvalidHandler, SendFailed, TooManyFailures
from kconsume.failures.dead_letter import DeadLetterLimit
from kconsume.failures.letter_headers import LetterDraft
from kconsume.failures.policy import Policy, Verdict, is_record_failure
from kconsume.failures.retry_topics import Moment, RetryChain
from kconsume.records import Message, Partition, index_of

_LONGEST_WAIT = 0.05
_LONGEST_DELAY_WAIT = 0.25
"""Seconds of one wait, at most: a lane must notice soon that it has to stop."""


@dataclass(frozen=True, slots=True)
class ChunkRules:
    """How the chunks of one handler are run. Read by all its workers, never written."""

    binding: Binding
    policy: Policy
    limiter: Limiter | None = None
    stores: bool = False
    """True if the offsets commit with the handler's writes, and a slice that fails is rolled back as a whole."""
    group: str = ""
    dead_letter_limit: DeadLetterLimit | None = None
    """Counts dead letters, if the policy has a limit."""
    outbox_is_full: Callable[[Partition], bool] | None = None
    """True if the outbox has so many rows of a partition that its handler must wait. None without an outbox."""
    retry_chain: RetryChain | None = None
    """The retry topics, if there are any."""
    saves_attempts: bool = False
    """True if the store can remember how often a record was tried."""
    clock: Callable[[], Moment] = field(kw_only=True)
    """The clock."""

    @property
    def undoes(self) -> bool:
        """True if a failed call has no effect: its writes are rolled back, or its output is dropped."""
        return self.stores or self.binding.sends

    @property
    def skips_inline(self) -> bool:
        """True if a failed record can be skipped without consulting the retry policy."""
        asked = (self.policy.retry, self.retry_chain, self.dead_letter_limit)
        return self.policy.skips_failures and not any(asked) and not self.undoes and not self.binding.batched

    def steps(self, lane: Lane, chunk: Chunk, report: SendReport) -> Steps:
        return ChunkRun(self, lane, chunk, report).steps()


class ChunkRun:
    """The run of one chunk. Used by the worker that runs the lane; a suspended run may continue on another worker."""

    def __init__(self, rules: ChunkRules, lane: Lane, chunk: Chunk, report: SendReport) -> None:
        self._rules = rules
        self._lane = lane
        self._first = chunk.first
        self._messages = chunk.messages
        self._log_end = chunk.end
        self._report = report
        self._position = 0
        """The index of the first message that is not finished."""
        self._until = self._cap = 0
        """Before index `until`, at most `cap` records run at once, because a record there has failed."""
        self._skipped_in_slice: list[tuple[Message, BaseException]] = []
        """Records of the running slice that failed and were skipped."""
        self._decisions = FailureDecisions(rules, lane)
        self._attempt = 1
        self._failed_at: float | None = None
        """When the record or batch that runs next failed first; None if it has not failed."""
        self._waited = 0.0
        """Seconds of `Wait` steps since the first failure. A dry run does not really wait; this count is its only
        clock."""
        self._batch_tried_until = 0
        """Before this index, the batch as a whole has used up all attempts."""
        self._letter_batch = LetterBatch(lane, chunk.first, report, rules.clock)
        """Letters about records that were skipped without a rollback. They are written together, because each letter
        alone would cost a round trip."""
        self._final_report: Failure | StoreRefused | None = None
        chain, topic = rules.retry_chain, lane.partition.topic
        self._delays = chain if chain is not None and chain.number_of(topic) else None
        """The retry chain, if these records are on one of its topics and have to wait."""
        self._since = rules.clock()
        """The latest time at which the records can have been written."""

    def steps(self) -> Steps:
        yield from self._run_records()
        try:
            if self._letter_batch:
                yield from self._letter_batch.hand_over()
            if self._lane.letters is not None and self._lane.letters.blocks_lane:
                yield from self._letter_batch.await_unblocked()
        except SendFailed as error:
            self._stop(self._letter_batch.first_message, error)
        if self._log_end is not None and not self._lane.stop_reasons:
            yield from self._move_to(self._log_end)
        if self._final_report is not None:
            self._report(self._final_report)

    def _run_records(self) -> Steps:
        lane, messages = self._lane, self._messages
        # Not kept in `self`: a reference cycle would keep every chunk in memory until the garbage collector runs.
        passes = self._skip_inline if self._rules.skips_inline else None
        while self._position < len(messages) and not lane.stop_reasons:
            if self._letter_batch.due or (self._letter_batch and self._rules.limiter is not None):
                yield from self._letter_batch.hand_over()
                continue
            if lane.letters is not None and lane.letters.blocks_lane:
                yield from self._letter_batch.await_unblocked()
                continue
            if self._rules.outbox_is_full is not None and self._rules.outbox_is_full(lane.partition):
                yield Wait(_LONGEST_WAIT, "outbox_full")
                continue
            if lane.earlier_attempts is not None:
                self._count_earlier_attempts(lane.earlier_attempts)
            size = self._size()
            if self._delays is not None and not (size := (yield from self._await_due(self._delays, size))):
                continue
            if self._rules.limiter is not None and not (size := (yield from self._await_rate(size))):
                return
            start = self._position
            part = messages if start == 0 and size >= len(messages) else messages[start : start + size]
            began = self._rules.clock().steady
            try:
                result = yield CallHandler(part, part, self._attempt, (), passes)
                if result.done:
                    lane.pace.measured(result.done, self._rules.clock().steady - began)
                    skipped = self._add_skipped_in_slice() if self._skipped_in_slice else 0
                    self._passed(part if result.done == len(part) else part[: result.done], skipped, skipped)
                if result.error is not None and not (yield from self._failed(part[result.done :], result)):
                    return
            except (SendFailed, TooManyFailures) as error:
                self._stop(part[0], error)
                return
            except Exception as error:  # raised by the store; the next claim finds the cause
                if not self._rules.stores:
                    raise  # the handler has no store, so no claim could find the cause
                lane.request_stop("store")
                self._final_report = StoreRefused(lane, error, self._rules.policy.holds_partition)
                return

    def _move_to(self, end: int) -> Steps:
        """Move the stored offset to the end of the log, because all delivered records are finished and none follows."""
        if end <= self._lane.stored:
            return
        try:
            yield MoveToLogEnd(end)
        except Exception as error:  # noqa: BLE001  (what the store raised; the next claim finds out what it means)
            self._lane.request_stop("store")
            self._final_report = StoreRefused(self._lane, error)
            return
        self._report(MovedToLogEnd(self._lane, end))

    def _size(self) -> int:
        if self._position < self._until:
            return min(self._cap, self._until - self._position)
        if self._rules.binding.batched:
            return len(self._messages) - self._position
        return self._lane.pace.size

    def _count_earlier_attempts(self, earlier: tuple[int, int]) -> None:
        """Count the attempts of an earlier owner, if that owner tried the first record of this run."""
        self._lane.earlier_attempts = None
        offset, attempts = earlier
        if self._messages[self._position].offset() == offset:
            self._attempt = attempts + 1
            if not self._rules.binding.batched:
                self._narrow(1, 1)

    def _await_due(self, chain: RetryChain, size: int) -> Generator[Step, StepResult, int]:
        """How many of the next records are due. Waits a short time if the first one is not."""
        due = 0
        for message in self._messages[self._position : self._position + size]:
            if (left := chain.seconds_left(message, self._since)) > 0:
                break
            due += 1
        if not due:
            yield Wait(min(left, _LONGEST_DELAY_WAIT), "retrying")
        return due

    def _await_rate(self, size: int) -> Generator[Step, StepResult, int]:
        """Wait until the rate lets records run. Returns how many may run: the batch or one record, so that each starts
        at its own time; 0 if the lane must stop."""
        limiter, batched = self._rules.limiter, self._rules.binding.batched
        assert limiter is not None
        wanted = min(size, len(self._messages) - self._position) if batched else 1
        while not self._lane.stop_reasons:
            granted, wait = limiter.take(wanted, wanted, self._lane if batched else None)
            if granted:
                return granted
            yield Wait(min(wait, _LONGEST_WAIT), "throttled")
        return 0

    # Failed records

    def _skip_inline(self, message: Message, error: BaseException) -> bool:
        """Fast path: skip one failed record without leaving the slice. Returns False if the record cannot be
        skipped."""
        if self._lane.stop_reasons or not is_record_failure(error):
            return False
        self._skipped_in_slice.append((message, error))
        return True

    def _add_skipped_in_slice(self) -> int:
        """Add the records that a slice skipped to the letter batch. Done at the end of the slice, because it would cost
        more between records."""
        rules, decisions, noted = self._rules, self._decisions, self._skipped_in_slice
        for message, raised in noted:
            error = rules.binding.explain(message, raised)
            writes_letter = rules.policy.verdict(error) is Verdict.DEAD_LETTER
            draft = decisions.draft(message, error, self._attempt) if writes_letter else None
            self._letter_batch.add(decisions.skipped_by_policy, message, error, draft)
        self._skipped_in_slice = []
        return len(noted)

    def _failed(self, part: Sequence[Message], result: StepResult) -> Generator[Step, StepResult, bool]:
        """Decide what follows the failure of a slice with no finished record. Returns whether to continue."""
        error, culprit = result.error, result.culprit
        assert error is not None
        assert culprit is not None
        if isinstance(error, BatchError) and self._rules.binding.batched:
            return (yield from self._finish_named(part, error))
        if not result.certain and not isinstance(error, Exception):
            self._stop(part[0], error)  # sys.exit() asks to stop: the handler must not be called again
            return False
        index = index_of(part, culprit)
        if not result.certain:
            batched = self._rules.binding.batched
            if batched and (yield from self._retry(part[0], error)):
                self._narrow(len(part), len(part))
                return True
            self._batch_tried_until = self._position + len(part) if batched else 0
            self._narrow(len(part), max(1, len(part) // 2))
            return True
        error = self._rules.binding.explain(culprit, error)
        if index and not self._runs_again_without(error):
            self._narrow(index, index)  # first the records before the failed one, then this record alone
            return True
        if not index and (yield from self._retry(culprit, error)):
            self._narrow(1, 1)
            return True
        return (yield from self._finish(part if index else part[:1], {index: error}))

    def _runs_again_without(self, error: BaseException) -> bool:
        """True if a slice was rolled back because of one record that is skipped now. Then the rest of the slice runs
        again as a whole, and not in pieces."""
        rules = self._rules
        if not rules.undoes or rules.binding.batched or self._decisions.stops(error):
            return False
        return rules.policy.pause(1, error, 0.0) is None

    def _retry(self, message: Message, error: BaseException) -> Generator[Step, StepResult, bool]:
        """Wait for the next attempt, if the policy allows one. Returns whether the failed records are to be run again.

        Also True if the lane must stop during the wait. Then nothing more runs, and the offset does not move.
        """
        now = self._rules.clock().steady
        if self._failed_at is None:
            self._failed_at = now
        spent, seconds = self._position < self._batch_tried_until, max(now - self._failed_at, self._waited)
        pause = None if spent else self._rules.policy.pause(self._attempt, error, seconds)
        if pause is None:
            return False
        yield LogRetry(message, self._attempt, pause, error)
        if self._letter_batch:
            yield from self._letter_batch.hand_over()
        if self._rules.saves_attempts:
            yield SaveAttempts(message.offset(), self._attempt)
        yield from self._letter_batch.wait(pause, "retrying")
        self._attempt += 1
        self._waited += pause
        return True

    def _finish_named(self, part: Sequence[Message], error: BatchError) -> Generator[Step, StepResult, bool]:
        """Finish a part in which the handler has named the failed records. The other records are finished or, in a
        transaction, must be run again."""
        if wrong := _naming_fault(error.errors.items(), len(part)):
            fault = InvalidHandler(f"{self._rules.binding.name} raised {wrong}")
            fault.__cause__ = error
            self._stop(part[0], fault)
            return False
        errors = {operator.index(given): cause for given, cause in error.errors.items()}
        if self._rules.undoes:
            if (yield from self._retry(part[min(errors)], errors[min(errors)])):
                self._narrow(len(part), len(part))
                return True
        else:
            errors = yield from self._retry_named(part, errors)
            if self._lane.stop_reasons:
                return True
            if not errors:
                self._passed(part)
                return True
        stopping = [at for at in sorted(errors) if self._decisions.stops(errors[at])]
        if stopping and stopping[0] and self._rules.undoes:
            self._narrow(stopping[0], stopping[0])
            return True
        reach = stopping[0] + 1 if stopping else len(part)
        return (yield from self._finish(part[:reach], {i: errors[i] for i in sorted(errors) if i < reach}))

    def _retry_named(
        self, part: Sequence[Message], errors: dict[int, BaseException]
    ) -> Generator[Step, StepResult, dict[int, BaseException]]:
        """Run only the named records again, while the policy allows it. Returns the records that still fail."""
        while (
            errors and (yield from self._retry(part[min(errors)], errors[min(errors)])) and not self._lane.stop_reasons
        ):
            places = sorted(errors)
            bad = [part[place] for place in places]
            result = yield CallHandler(bad, bad, self._attempt)
            if isinstance(result.error, BatchError) and not _naming_fault(result.error.errors.items(), len(bad)):
                errors = {places[operator.index(index)]: cause for index, cause in result.error.errors.items()}
            elif result.error is not None:
                errors = yield from self._each_alone(part, places)
            elif result.done:
                errors = {}
        return errors

    def _each_alone(
        self, part: Sequence[Message], places: Sequence[int]
    ) -> Generator[Step, StepResult, dict[int, BaseException]]:
        errors: dict[int, BaseException] = {}
        for place in places:
            result = yield CallHandler(part[place : place + 1], part[place : place + 1], self._attempt)
            if result.error is not None:
                named = result.error.errors.get(0) if isinstance(result.error, BatchError) else None
                errors[place] = named if isinstance(named, BaseException) else result.error
        return errors

    def _finish(
        self, part: Sequence[Message], errors: Mapping[int, BaseException]
    ) -> Generator[Step, StepResult, bool]:
        """Skip the failed records of a part, or stop at one of them. The other records are finished or can be.

        Returns whether to continue.
        """
        *_, last = errors
        good = [message for index, message in enumerate(part) if index not in errors]
        dead = [error for error in errors.values() if self._decisions.verdict(error) is Verdict.DEAD_LETTER]
        if self._decisions.stops(errors[last]):
            earlier = {index: error for index, error in errors.items() if index != last}
            self._add_skipped(part, earlier, self._decisions.drafts(part, earlier, self._attempt))
            self._passed(part[:last], skipped=len(earlier), failed=len(dead))
            self._stop(part[last], errors[last])
            return False
        if dead and (limit := self._rules.dead_letter_limit) is not None and limit.exceeds(len(dead)):
            self._stop(part[last], self._decisions.too_many(errors[last]))
            return False
        drafts = self._decisions.drafts(part, errors, self._attempt)
        if self._rules.undoes:
            if good and self._rules.limiter is not None and not (yield from self._await_rate(len(good))):
                return True  # the lane must stop
            written = [draft.letter() for draft in drafts.values()]
            step = CallHandler(part, good, self._attempt, written) if good else SkipRecords(part, written)
            result = yield from self._letter_batch.until_written(step)
            if result.error is not None:
                at = index_of(part, result.culprit) if result.certain and result.culprit is not None else 0
                self._narrow(at or len(part), at or max(1, len(part) // 2))
                return True
            if not result.done:
                return True  # the lane must stop; the step did not begin
            drafts = {}  # the letters are written
        self._add_skipped(part, errors, drafts)
        self._passed(part, skipped=len(errors), failed=len(dead))
        return True

    def _add_skipped(
        self, part: Sequence[Message], errors: Mapping[int, BaseException], drafts: Mapping[int, LetterDraft]
    ) -> None:
        """Pass skipped records to the log, and their letters, if not written yet, to the letter batch."""
        for index, error in errors.items():
            skipped, draft = self._decisions.skipped_how(error), drafts.get(index) if drafts else None
            self._letter_batch.add(skipped, part[index], error, draft)

    def _narrow(self, length: int, cap: int) -> None:
        self._until, self._cap = self._position + length, cap

    def _stop(self, message: Message, error: BaseException) -> None:
        self._lane.request_stop("failed")
        holds = self._rules.policy.verdict(error) is Verdict.HOLD
        self._final_report = Failure(self._lane, self._rules.binding.name, message, error, holds)

    # Finished records

    def _passed(self, part: Sequence[Message], skipped: int = 0, failed: int = 0) -> None:
        """Note that records are finished.

        Args:
            part: the records.
            skipped: how many of the records the handler did not handle.
            failed: how many of the skipped records failed for good.
        """
        if not part:
            return
        self._position += len(part)
        if self._position >= self._batch_tried_until:
            self._attempt, self._failed_at, self._waited = 1, None, 0.0
        if self._rules.dead_letter_limit is not None:
            self._rules.dead_letter_limit.note(len(part), failed)
        if self._position < self._until:
            self._cap = max(1, (self._until - self._position) // 2)
        handled = len(part) - skipped
        if not self._letter_batch.drafts:
            self._report_progress(part, handled, skipped)
            return
        # Records before the first failed record need not wait for its letter, unless they wait for an earlier letter
        # anyway.
        waits_anyway = self._letter_batch.withholds or self._waits_for_letters
        if not waits_anyway and (clean := index_of(part, self._letter_batch.first_message)):
            self._report_progress(part[:clean], clean, 0)
            handled -= clean
        self._letter_batch.withhold(part[-1], handled, skipped)

    @property
    def _waits_for_letters(self) -> bool:
        return self._lane.letters is not None and not self._lane.letters.is_empty

    def _report_progress(self, part: Sequence[Message], handled: int, skipped: int) -> None:
        lane, last, stores = self._lane, part[-1], self._rules.stores
        upto = lane.stored if stores else last.offset() + 1
        progress = Progress(lane, self._first, upto, handled, skipped, last.leader_epoch(), stores, part)
        if lane.letters is None:
            self._report(progress)
        else:
            lane.letters.report_in_order(progress)


def _naming_fault(errors: Collection[tuple[object, object]], records: int) -> str | None:
    """What is wrong with the errors of a `BatchError`; None if nothing is."""
    if not errors:
        return "BatchError({}): name the records that failed, or return"
    for index, cause in errors:
        if not isinstance(index, SupportsIndex) or index not in range(records):
            return (
                f"BatchError with {index!r}, and its batch has the indexes 0 to {records - 1}: name the records that "
                f"failed by their index in the batch"
            )
        if not isinstance(cause, BaseException):
            return f"BatchError with a {type(cause).__name__} for index {index!r}: give the exception that says why"
    return None

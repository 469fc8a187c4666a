"""The course of a chunk: what is run next, and what its outcome means.

A generator without I/O. It yields a `Step`, is sent the `Outcome` that carrying it out had, and reports how far the
chunk came; `work.py` carries the steps out, on a thread or on an event loop. So both have one set of decisions.

Records are run in slices that `Pace` sizes by the handler's speed; a batch is run as it is. When something fails and it
is not known which record did it, the slice is halved until it is.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsIndex

from kconsume.errors import BatchError, InvalidHandler, SendFailed, TooManyFailures
from kconsume.failures.dead_letter import Gauge
from kconsume.failures.letters import Draft, Rung, cause_of
from kconsume.failures.passed_over import where, why
from kconsume.failures.policy import Policy, Verdict, is_of_a_record
from kconsume.failures.retry_topics import Ladder
from kconsume.handler import Binding
from kconsume.rate import Limiter
from kconsume.records import Message, Partition, index_of
from kconsume.runtime.lanes import Chunk, Ejected, Ended, Failure, Lane, Progress, Report
from kconsume.runtime.owing import Owing
from kconsume.runtime.steps import MoveTo, Note, Outcome, PassOver, Rest, Step, Steps, Try

_log = logging.getLogger("kconsume.failures")
_clock = time.perf_counter
_LONGEST_REST = 0.05
_LONGEST_LATER = 0.25


@dataclass(frozen=True, slots=True)
class Course:
    """How chunks of one handler are run."""

    binding: Binding
    policy: Policy
    limiter: Limiter | None = None
    stores: bool = False
    """Whether what is done is committed with the work, and undone as a whole when it fails."""
    group: str = ""
    gauge: Gauge | None = None
    """Of dead letters, if there is a limit to them."""
    is_full: Callable[[Partition], bool] | None = None
    """Whether the outbox of a partition is, where there is one."""
    ladder: Ladder | None = None
    """Of records that are tried again later."""
    notes: bool = False
    """Whether the store can remember how often a record was tried."""

    @property
    def undoes(self) -> bool:
        """Whether something is undone when a call fails: what it wrote in its transaction, or what it sent."""
        return self.stores or self.binding.sends

    @property
    def passes_at_once(self) -> bool:
        """Whether of a record that has failed nothing is asked but whether it is passed over."""
        asked = (self.policy.retry, self.ladder, self.gauge)
        return self.policy.goes_on and not any(asked) and not self.undoes and not self.binding.batched

    def steps(self, lane: Lane, chunk: Chunk, report: Report) -> Steps:
        return _Run(self, lane, chunk, report).steps()


class _Run:
    """One chunk on its way."""

    def __init__(self, course: Course, lane: Lane, chunk: Chunk, report: Report) -> None:
        self._course = course
        self._lane = lane
        self._first = chunk.first
        self._messages = chunk.messages
        self._log_end = chunk.end
        self._report = report
        self._at = 0
        self._until = self._cap = 0
        """Up to `until`, at most `cap` records are run at once: something there has failed."""
        self._in_passing: list[tuple[Message, BaseException]] = []
        """Of the slice that is run, those that have failed and were passed over."""
        self._end = _end_of(course.policy)
        self._attempt = 1
        self._failed_at: float | None = None
        """When what is run next first failed, if it did."""
        self._rested = 0.0
        """How long it has waited since; where nobody really waits (`trial.py`), the only clock."""
        self._spent = 0
        """Up to here, all attempts were made by the batch as a whole."""
        self._owing = Owing(lane, chunk.first, report)
        """Letters about records that are not undone with others: each by itself would cost a round trip."""
        self._ending: Failure | Ejected | None = None
        ladder, topic = course.ladder, lane.partition.topic
        self._waits_on = ladder if ladder is not None and ladder.number_of(topic) else None
        """The ladder, if these records are on one."""

    def steps(self) -> Steps:
        yield from self._all()
        try:
            if self._owing:
                yield from self._owing.pay()
            if self._lane.under_way is not None and self._lane.under_way.holds:
                yield from self._owing.settle()
        except SendFailed as error:
            self._stop(self._owing.first, error)
        if self._log_end is not None and not self._lane.stop:
            yield from self._move_to(self._log_end)
        if self._ending is not None:
            self._report(self._ending)

    def _all(self) -> Steps:
        lane, messages = self._lane, self._messages
        # Not kept in `self`: that would be a circle, and every chunk there until the collector comes by.
        passes = self._pass_over if self._course.passes_at_once else None
        while self._at < len(messages) and not lane.stop:
            if self._owing.due or (self._owing and self._course.limiter is not None):
                yield from self._owing.pay()
                continue
            if lane.under_way is not None and lane.under_way.holds:
                yield from self._owing.settle()
                continue
            if self._course.is_full is not None and self._course.is_full(lane.partition):
                yield Rest(_LONGEST_REST)
                continue
            if lane.tried is not None:
                self._go_on_with(lane.tried)
            size = self._size()
            if self._waits_on is not None and not (size := (yield from self._due(self._waits_on, size))):
                continue
            if self._course.limiter is not None and not (size := (yield from self._permitted(size))):
                return
            part = messages if self._at == 0 and size >= len(messages) else messages[self._at : self._at + size]
            began = _clock()
            try:
                outcome = yield Try(part, part, self._attempt, (), passes)
                if outcome.done:
                    lane.pace.took(outcome.done, _clock() - began - outcome.waited)
                    skipped = self._note_in_passing() if self._in_passing else 0
                    self._passed(part if outcome.done == len(part) else part[: outcome.done], skipped, skipped)
                if outcome.error is not None and not (yield from self._failed(part[outcome.done :], outcome)):
                    return
            except (SendFailed, TooManyFailures) as error:
                self._stop(part[0], error)
                return
            except Exception as error:  # whatever the store raised; the claim finds out what it means
                if not self._course.stores:
                    raise  # there is no store in it, so no claim would ever find out
                lane.brake("store")
                self._ending = Ejected(lane, error, self._course.policy.holds)
                return

    def _move_to(self, end: int) -> Steps:
        """Everything that was delivered is done, and the log ends behind it: nothing is left to wait for."""
        if end <= self._lane.stored:
            return
        try:
            yield MoveTo(end)
        except Exception as error:  # noqa: BLE001  (whatever the store raised; the claim finds out what it means)
            self._lane.brake("store")
            self._ending = Ejected(self._lane, error)
            return
        self._report(Ended(self._lane, end))

    def _size(self) -> int:
        if self._at < self._until:
            return min(self._cap, self._until - self._at)
        if self._course.binding.batched:
            return len(self._messages) - self._at
        return self._lane.pace.size

    def _go_on_with(self, tried: tuple[int, int]) -> None:
        """An earlier owner has tried a record so often: those attempts count, if it is the first that we come to."""
        self._lane.tried = None
        offset, attempts = tried
        if self._messages[self._at].offset() == offset:
            self._attempt = attempts + 1
            if not self._course.binding.batched:
                self._narrow(1, 1)

    def _due(self, ladder: Ladder, size: int) -> Generator[Step, Outcome, int]:
        """How many records from here on may be tried by now. Waits a little for the first."""
        due = 0
        for message in self._messages[self._at : self._at + size]:
            if (left := ladder.seconds_left(message)) > 0:
                break
            due += 1
        if not due:
            yield Rest(min(left, _LONGEST_LATER))
        return due

    def _permitted(self, size: int) -> Generator[Step, Outcome, int]:
        """How many records the rate lets run now: the batch, or one, so that each starts when it is granted. Waits."""
        limiter, batched = self._course.limiter, self._course.binding.batched
        assert limiter is not None
        wanted = min(size, len(self._messages) - self._at) if batched else 1
        while not self._lane.stop:
            granted, wait = limiter.take(wanted, wanted, self._lane if batched else None)
            if granted:
                return granted
            yield Rest(min(wait, _LONGEST_REST))
        return 0

    # What failed

    def _pass_over(self, message: Message, error: BaseException) -> bool:
        """The usual failure, by a short way, for there may be many: one record of a slice that is not left for it, with
        nothing to ask but whether it is passed over. False, with nothing done, if it is not."""
        if self._lane.stop or not is_of_a_record(error):
            return False
        self._in_passing.append((message, error))
        return True

    def _note_in_passing(self) -> int:
        """All that a slice has passed over, at its end: between its records, that would cost more."""
        course, noted = self._course, self._in_passing
        for message, raised in noted:
            error = course.binding.explain(message, raised)
            buries = course.policy.verdict(error) is Verdict.BURY
            draft = self._draft(message, error) if buries else None
            self._owing.note(self._end, message, error, draft)
        self._in_passing = []
        return len(noted)

    def _failed(self, part: Sequence[Message], outcome: Outcome) -> Generator[Step, Outcome, bool]:
        """Deal with the failure of a slice of which nothing is done. Whether to go on."""
        error, culprit = outcome.error, outcome.culprit
        assert error is not None
        assert culprit is not None
        if isinstance(error, BatchError) and self._course.binding.batched:
            return (yield from self._named(part, error))
        if not outcome.certain and not isinstance(error, Exception):
            self._stop(part[0], error)  # sys.exit() asks to stop, and not to be called again
            return False
        index = index_of(part, culprit)
        if not outcome.certain:
            batched = self._course.binding.batched
            if batched and (yield from self._try_again(part[0], error)):
                self._narrow(len(part), len(part))
                return True
            self._spent = self._at + len(part) if batched else 0
            self._narrow(len(part), max(1, len(part) // 2))
            return True
        error = self._course.binding.explain(culprit, error)
        if index and not self._is_undone_for(error):
            self._narrow(index, index)  # those before it first; then it alone
            return True
        if not index and (yield from self._try_again(culprit, error)):
            self._narrow(1, 1)
            return True
        return (yield from self._settle(part if index else part[:1], {index: error}))

    def _is_undone_for(self, error: BaseException) -> bool:
        """Whether all of a slice was undone for one record that is passed now: then it is run again without it, and
        not piece by piece."""
        course = self._course
        if not course.undoes or course.binding.batched or self._stops(error):
            return False
        return course.policy.pause(1, error, 0.0) is None

    def _try_again(self, message: Message, error: BaseException) -> Generator[Step, Outcome, bool]:
        """Whether what failed is to be run again; waits until it is time. Told to stop meanwhile, it is also true:
        then nothing more is run, and nothing is passed."""
        now = _clock()
        if self._failed_at is None:
            self._failed_at = now
        spent, seconds = self._at < self._spent, max(now - self._failed_at, self._rested)
        pause = None if spent else self._course.policy.pause(self._attempt, error, seconds)
        if pause is None:
            return False
        _log.info("failed %s attempt=%d again_in=%.3g %s", where(message), self._attempt, pause, why(error))
        if self._owing:
            yield from self._owing.pay()
        if self._course.notes:
            yield Note(message.offset(), self._attempt)
        yield from self._owing.rest(pause)
        self._attempt += 1
        self._rested += pause
        return True

    def _named(self, part: Sequence[Message], error: BatchError) -> Generator[Step, Outcome, bool]:
        """The handler has named the records that failed: the others are done, or, in a transaction, to be done."""
        if misnamed := _misnamed(error.errors.items(), len(part)):
            fault = InvalidHandler(f"{self._course.binding.name} raised {misnamed}")
            fault.__cause__ = error
            self._stop(part[0], fault)
            return False
        errors = {operator.index(given): cause for given, cause in error.errors.items()}
        if self._course.undoes:
            if (yield from self._try_again(part[min(errors)], errors[min(errors)])):
                self._narrow(len(part), len(part))
                return True
        else:
            errors = yield from self._without_the_good(part, errors)
            if self._lane.stop:
                return True
            if not errors:
                self._passed(part)
                return True
        stopping = [at for at in sorted(errors) if self._stops(errors[at])]
        if stopping and stopping[0] and self._course.undoes:
            self._narrow(stopping[0], stopping[0])
            return True
        reach = stopping[0] + 1 if stopping else len(part)
        return (yield from self._settle(part[:reach], {i: errors[i] for i in sorted(errors) if i < reach}))

    def _without_the_good(
        self, part: Sequence[Message], errors: dict[int, BaseException]
    ) -> Generator[Step, Outcome, dict[int, BaseException]]:
        """The batch is done but for these: run them again, and nothing else. Answers which still fail."""
        while errors and (yield from self._try_again(part[min(errors)], errors[min(errors)])) and not self._lane.stop:
            places = sorted(errors)
            bad = [part[place] for place in places]
            outcome = yield Try(bad, bad, self._attempt)
            if isinstance(outcome.error, BatchError) and not _misnamed(outcome.error.errors.items(), len(bad)):
                errors = {places[operator.index(index)]: cause for index, cause in outcome.error.errors.items()}
            elif outcome.error is not None:
                errors = yield from self._one_by_one(part, places)
            elif outcome.done:
                errors = {}
        return errors

    def _one_by_one(
        self, part: Sequence[Message], places: Sequence[int]
    ) -> Generator[Step, Outcome, dict[int, BaseException]]:
        errors: dict[int, BaseException] = {}
        for place in places:
            outcome = yield Try(part[place : place + 1], part[place : place + 1], self._attempt)
            if outcome.error is not None:
                named = outcome.error.errors.get(0) if isinstance(outcome.error, BatchError) else None
                errors[place] = named if isinstance(named, BaseException) else outcome.error
        return errors

    def _settle(self, part: Sequence[Message], errors: Mapping[int, BaseException]) -> Generator[Step, Outcome, bool]:
        """Finish with a part of which these records failed and the others are done, or can be."""
        *_, last = errors
        good = [message for index, message in enumerate(part) if index not in errors]
        if self._stops(errors[last]):
            earlier = {index: error for index, error in errors.items() if index != last}
            self._owe(part, earlier, self._letters(part, earlier))
            self._passed(part[:last], skipped=len(earlier), failed=len(earlier))
            self._stop(part[last], errors[last])
            return False
        buried = [error for error in errors.values() if self._verdict(error) is Verdict.BURY]
        if buried and (gauge := self._course.gauge) is not None and gauge.exceeds(len(buried)):
            return self._too_many(part[last], errors[last])
        drafts = self._letters(part, errors)
        if self._course.undoes:
            if good and self._course.limiter is not None and not (yield from self._permitted(len(good))):
                return True  # told to stop meanwhile
            written = [draft.letter() for draft in drafts.values()]
            step = Try(part, good, self._attempt, written) if good else PassOver(part, written)
            outcome = yield from self._owing.written(step)
            if outcome.error is not None:
                at = index_of(part, outcome.culprit) if outcome.certain and outcome.culprit is not None else 0
                self._narrow(at or len(part), at or max(1, len(part) // 2))
                return True
            if not outcome.done:
                return True  # told to stop before it began
            drafts = {}  # they are written
        self._owe(part, errors, drafts)
        self._passed(part, skipped=len(errors), failed=len(buried))
        return True

    def _owe(self, part: Sequence[Message], errors: Mapping[int, BaseException], drafts: Mapping[int, Draft]) -> None:
        """Records were passed over: have that said, and their letters written, if they are not yet."""
        for index, error in errors.items():
            self._owing.note(self._what_becomes(error), part[index], error, drafts.get(index) if drafts else None)

    def _letters(self, part: Sequence[Message], errors: Mapping[int, BaseException]) -> dict[int, Draft]:
        """Drafts of those that are to be written, by the index of their record."""
        drafts: dict[int, Draft] = {}
        for index, error in errors.items():
            rung = self._rung(error)
            if rung is not None or self._course.policy.dead_letter is not None:
                drafts[index] = self._draft(part[index], error, rung)
        return drafts

    def _draft(self, message: Message, error: BaseException, rung: Rung | None = None) -> Draft:
        group, lane = self._course.group, self._lane
        return Draft(message, cause_of(error), group, lane.scope, self._attempt, rung, lane.reset_epoch)

    def _rung(self, error: BaseException) -> Rung | None:
        """Where a record goes that failed with it, if it is tried again later."""
        ladder = self._course.ladder
        return None if ladder is None else ladder.next(self._lane.partition.topic, error)

    def _too_many(self, message: Message, error: BaseException) -> bool:
        dead_letter = self._course.policy.dead_letter
        assert dead_letter is not None
        fault = TooManyFailures(
            f"{self._course.binding.name} failed on more records than limit={dead_letter.limit:g} of {dead_letter!r} "
            f"allows in {dead_letter.window:g} s, so this one was neither written nor passed: mend what fails, or "
            f"raise the limit"
        )
        fault.__cause__ = error
        self._stop(message, fault)
        return False

    def _verdict(self, error: BaseException) -> Verdict:
        return Verdict.LATER if self._rung(error) is not None else self._course.policy.verdict(error)

    def _stops(self, error: BaseException) -> bool:
        return self._verdict(error) in (Verdict.STOP, Verdict.HOLD)

    def _what_becomes(self, error: BaseException) -> str:
        """In the words of the log."""
        if (rung := self._rung(error)) is not None:
            return f"later by={rung.topic}"
        return self._end

    def _narrow(self, length: int, cap: int) -> None:
        self._until, self._cap = self._at + length, cap

    def _stop(self, message: Message, error: BaseException) -> None:
        self._lane.brake("failed")
        holds = self._course.policy.verdict(error) is Verdict.HOLD
        self._ending = Failure(self._lane, self._course.binding.name, message, error, holds)

    # What is done

    def _passed(self, part: Sequence[Message], skipped: int = 0, failed: int = 0) -> None:
        """`skipped`: those that were not handled; `failed`: those of them that failed for good."""
        if not part:
            return
        self._at += len(part)
        if self._at >= self._spent:
            self._attempt, self._failed_at, self._rested = 1, None, 0.0
        if self._course.gauge is not None:
            self._course.gauge.note(len(part), failed)
        if self._at < self._until:
            self._cap = max(1, (self._until - self._at) // 2)
        handled = len(part) - skipped
        if not self._owing.drafts:
            self._tell(part, handled, skipped)
            return
        # Those before the first that failed need not wait for its letter; unless they wait for an earlier one anyway.
        if not self._owing.holds_back and not self._is_behind_letters and (clean := index_of(part, self._owing.first)):
            self._tell(part[:clean], clean, 0)
            handled -= clean
        self._owing.hold_back(part[-1], handled, skipped)

    @property
    def _is_behind_letters(self) -> bool:
        return self._lane.under_way is not None and not self._lane.under_way.empty

    def _tell(self, part: Sequence[Message], handled: int, skipped: int) -> None:
        lane, last, stores = self._lane, part[-1], self._course.stores
        upto = lane.stored if stores else last.offset() + 1
        progress = Progress(lane, self._first, upto, handled, skipped, last.leader_epoch(), stores, part)
        if lane.under_way is None:
            self._report(progress)
        else:
            lane.under_way.tell(progress)


def _end_of(policy: Policy) -> str:
    """What becomes of a record that is passed over, in the words of the log."""
    dead_letter = policy.dead_letter
    return "skipped" if dead_letter is None else f"dead letter to={dead_letter.topic or dead_letter.table}"


def _misnamed(errors: Collection[tuple[object, object]], records: int) -> str | None:
    """What is wrong with the names that a handler gave, if something is."""
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

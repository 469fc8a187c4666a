"""The dead letters of a chunk that are not handed over yet, and the reports that wait for them.

Part of the rules of a chunk, and pure like the rules: it yields steps.
Letters are handed over soon after their records have failed, at the latest at the end of the chunk. Until the letters
are confirmed, later records run but are not reported (`_runtime/output/letters_in_flight.py`). A letter that cannot be
written blocks the lane. The letter is logged, and tried until it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Generator

from kconsume._runtime.lanes.lane import Lane
from kconsume._runtime.lanes.reports import Progress, SendReport
from kconsume._runtime.output.letters_in_flight import LetterGroup, LettersInFlight
from kconsume._runtime.processing.steps import LogUnwritten, SkipRecords, SliceStep, Step, StepResult, Wait
from kconsume.errors import LetterFailed
from kconsume.failures.letter_headers import LetterDraft
from kconsume.failures.retry_topics import Moment
from kconsume.failures.skip_log import Skipped, SkippedRecords
from kconsume.records import Message

_LONGEST_WAIT = 0.05
_POLL_EVERY = 0.005
"""Seconds between two checks of letters for which the lane must wait."""
_LONGEST_DELAY = 0.05
"""Most seconds that a letter waits for other letters."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
"""Seconds before a letter that could not be written is tried again: the first and the longest pause."""


class LetterBatch:
    """The letters of one chunk. Used by the worker that runs the lane."""

    def __init__(self, lane: Lane, first: int, report: SendReport, clock: Callable[[], Moment]) -> None:
        """
        Args:
            lane: the lane of the chunk.
            first: the offset at which the chunk begins.
            report: takes the reports of the lane.
            clock: reads the time.
        """
        self._clock = clock
        self._lane = lane
        self._first = first
        self._report = report
        self.drafts: list[LetterDraft] = []
        """The letters that will be handed over."""
        self._messages: list[Message] = []
        """The records that the letters are about."""
        self._skipped_records = SkippedRecords()
        self._since: float | None = None
        """When the first of these records failed, if there is one."""
        # The records whose report waits until the letters are confirmed: the last one, and how many.
        self._last: Message | None = None
        self._handled = self._skipped = 0

    def __bool__(self) -> bool:
        return self._since is not None

    @property
    def due(self) -> bool:
        """True if the letters have waited long enough for other letters."""
        return self._since is not None and self._clock().steady - self._since > _LONGEST_DELAY

    @property
    def first_message(self) -> Message:
        return self._messages[0]

    def add(self, skipped: Skipped, message: Message, error: BaseException, draft: LetterDraft | None) -> None:
        """Add a record that is skipped.

        Args:
            skipped: what happens to the record, for the log.
            message: the record.
            error: why it failed.
            draft: its letter, if one is to be handed over.
        """
        if self._since is None:
            self._since = self._clock().steady
        self._skipped_records.add(skipped, message, error)
        if draft is not None:
            self._messages.append(message)
            self.drafts.append(draft)

    @property
    def withholds(self) -> bool:
        """True if a report waits for the letters."""
        return self._last is not None

    def withhold(self, last: Message, handled: int, skipped: int) -> None:
        """Note that the records up to `last` are finished. They are reported once the letters are confirmed."""
        self._last = last
        self._handled += handled
        self._skipped += skipped

    def hand_over(self) -> Generator[Step, StepResult, None]:
        """Hand the letters over, and log what was skipped. If the lane stops first, nothing is sent, logged or
        reported."""
        if self.drafts:
            messages, drafts = self._messages, self.drafts
            result = yield from self.until_written(SkipRecords(messages, (), drafts))
            progress = self._progress()
            self.drafts, self._messages = [], []
            if result.delivery is not None:
                self._in_flight.track(LetterGroup(messages, drafts), result.delivery, progress)
            elif result.done:  # the step has waited for the letters
                self._in_flight.report_in_order(progress)
            else:
                self._skipped_records = SkippedRecords()
        self._lane.skip_log.add(self._skipped_records)
        self._since = None

    @property
    def _in_flight(self) -> LettersInFlight:
        if self._lane.letters is None:
            self._lane.letters = LettersInFlight(self._lane, self._report)
        return self._lane.letters

    def _progress(self) -> Progress:
        last, handled, skipped = self._last, self._handled, self._skipped
        self._last, self._handled, self._skipped = None, 0, 0
        assert last is not None
        # The report has no records, because there are many and only the bytes of the letters are limited here.
        return Progress(self._lane, self._first, last.offset() + 1, handled, skipped, last.leader_epoch())

    def await_unblocked(self) -> Generator[Step, StepResult, None]:
        """Wait until letters no longer block the lane, or the lane must stop. Letters that could not be written are
        sent again."""
        in_flight, lane, pause = self._in_flight, self._lane, _FIRST_PAUSE
        while in_flight.blocks_lane and not lane.stop_reasons:
            if failed := in_flight.failed:
                yield LogUnwritten(failed[0].messages[0], failed[0].error)
                yield from self.wait(pause, "dead_letter_unwritten")
                pause = min(2 * pause, _LONGEST_PAUSE)
                yield from self._send_again(in_flight, failed)
            else:
                yield Wait(_POLL_EVERY, "dead_letter_unwritten")

    def _send_again(self, in_flight: LettersInFlight, failed: list[LetterGroup]) -> Generator[Step, StepResult, None]:
        """Send letters again, and wait until they are confirmed or have failed."""
        for group in failed:
            if self._lane.stop_reasons:
                return
            try:
                result = yield SkipRecords(group.messages, (), group.drafts)
            except LetterFailed as error:
                group.error = error
                return
            assert result.delivery is not None
            in_flight.track_again(group, result.delivery)
        while not self._lane.stop_reasons and not all(group.confirmed or group.error is not None for group in failed):
            yield Wait(_POLL_EVERY, "dead_letter_unwritten")

    def until_written(self, step: SliceStep) -> Generator[Step, StepResult, StepResult]:
        """Yield a step with letters until they are written. Returns a result with nothing done if the lane stops
        first."""
        pause = _FIRST_PAUSE
        while True:
            try:
                return (yield step)
            except LetterFailed as error:
                unwritten = LogUnwritten(step.part[0], error)
            yield unwritten
            yield from self.wait(pause, "dead_letter_unwritten")
            if self._lane.stop_reasons:
                return StepResult(0)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def wait(self, seconds: float, code: str) -> Generator[Step, StepResult, None]:
        """Wait this long, or until the lane must stop.

        Args:
            code: what the partition waits for, as in `_runtime/observation/causes`.
        """
        while seconds > 0 and not self._lane.stop_reasons:
            yield Wait(min(seconds, _LONGEST_WAIT), code)
            seconds -= _LONGEST_WAIT

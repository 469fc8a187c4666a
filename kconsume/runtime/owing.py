"""What a chunk owes: letters that are gathered and handed over together, and the reports that wait for them.

A part of a chunk's course, and like it a generator without I/O. Letters are handed over soon after their records have
failed, and at the end of the chunk at the latest; the records behind them are run meanwhile, but not reported
(`under_way.py`). A letter that cannot be written holds the lane: it is tried until it can, and said.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator

from kconsume.errors import LetterFailed
from kconsume.failures.letters import Draft
from kconsume.failures.passed_over import PassedOver, where
from kconsume.records import Message
from kconsume.runtime.lanes import Lane, Progress, Report
from kconsume.runtime.steps import Outcome, PassOver, Rest, Step, Try
from kconsume.runtime.under_way import Parcel, UnderWay

_log = logging.getLogger("kconsume.failures")
_clock = time.perf_counter
_LONGEST_REST = 0.05
_GLANCE = 0.005
"""Seconds between two looks whether letters are confirmed that must be waited for."""
_AT_MOST = 0.05
"""Seconds that a letter waits for others."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
"""Seconds before a letter that could not be written is tried again."""


class Owing:
    """Of one chunk."""

    def __init__(self, lane: Lane, first: int, report: Report) -> None:
        self._lane = lane
        self._first = first
        self._report = report
        self.drafts: list[Draft] = []
        """Of letters that are to be handed over."""
        self._messages: list[Message] = []
        """The records that they are about."""
        self._passed_over = PassedOver()
        self._since: float | None = None
        """When the first of these failed, if there is one."""
        self._last: Message | None = None
        self._handled = self._skipped = 0
        """What waits for the letters to be confirmed: so many records, and which is the last."""

    def __bool__(self) -> bool:
        return self._since is not None

    @property
    def due(self) -> bool:
        return self._since is not None and _clock() - self._since > _AT_MOST

    @property
    def first(self) -> Message:
        return self._messages[0]

    def note(self, what: str, message: Message, error: BaseException, draft: Draft | None) -> None:
        """A record is passed over: that is to be said, and its letter, if it has one, to be written."""
        if self._since is None:
            self._since = _clock()
        self._passed_over.add(what, message, error)
        if draft is not None:
            self._messages.append(message)
            self.drafts.append(draft)

    @property
    def holds_back(self) -> bool:
        return self._last is not None

    def hold_back(self, last: Message, handled: int, skipped: int) -> None:
        """Records up to this one are done, and reported when the letters are confirmed."""
        self._last = last
        self._handled += handled
        self._skipped += skipped

    def pay(self) -> Generator[Step, Outcome, None]:
        """Hand the letters over, and have the log tell what was passed over. Told to stop before they could be, nothing
        was: neither is it told, nor is anything reported of what waits for them."""
        if self.drafts:
            messages, drafts = self._messages, self.drafts
            outcome = yield from self.written(PassOver(messages, (), drafts))
            progress = self._progress()
            self.drafts, self._messages = [], []
            if outcome.delivery is not None:
                self._under_way.send(Parcel(messages, drafts), outcome.delivery, progress)
            elif outcome.done:  # they were waited for
                self._under_way.tell(progress)
            else:
                self._passed_over = PassedOver()
        self._lane.tally.add(self._passed_over)
        self._since = None

    @property
    def _under_way(self) -> UnderWay:
        if self._lane.under_way is None:
            self._lane.under_way = UnderWay(self._lane, self._report)
        return self._lane.under_way

    def _progress(self) -> Progress:
        last, handled, skipped = self._last, self._handled, self._skipped
        self._last, self._handled, self._skipped = None, 0, 0
        assert last is not None
        # Without its records: they are many, and what waits for letters is bounded by what the letters hold.
        return Progress(self._lane, self._first, last.offset() + 1, handled, skipped, last.leader_epoch())

    def settle(self) -> Generator[Step, Outcome, None]:
        """Wait until the lane is not held any more, or told to stop. What could not be written is sent again."""
        under_way, lane, pause = self._under_way, self._lane, _FIRST_PAUSE
        while under_way.holds and not lane.stop:
            if failed := under_way.failed:
                _say_held(failed[0].messages[0], failed[0].error)
                yield from self.rest(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                yield from self._send_again(under_way, failed)
            else:
                yield Rest(_GLANCE)

    def _send_again(self, under_way: UnderWay, failed: list[Parcel]) -> Generator[Step, Outcome, None]:
        """And wait for what comes of it."""
        for parcel in failed:
            if self._lane.stop:
                return
            try:
                outcome = yield PassOver(parcel.messages, (), parcel.drafts)
            except LetterFailed as error:
                parcel.error = error
                return
            assert outcome.delivery is not None
            under_way.send_again(parcel, outcome.delivery)
        while not self._lane.stop and not all(parcel.confirmed or parcel.error is not None for parcel in failed):
            yield Rest(_GLANCE)

    def written(self, step: Try | PassOver) -> Generator[Step, Outcome, Outcome]:
        """A step with letters. One that cannot be written holds the lane: it is tried until it can, and said."""
        pause = _FIRST_PAUSE
        while True:
            try:
                return (yield step)
            except LetterFailed as error:
                _say_held(step.part[0], error)
            yield from self.rest(pause)
            if self._lane.stop:
                return Outcome(0)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def rest(self, seconds: float) -> Generator[Step, Outcome, None]:
        while seconds > 0 and not self._lane.stop:
            yield Rest(min(seconds, _LONGEST_REST))
            seconds -= _LONGEST_REST


def _say_held(message: Message, error: BaseException | None) -> None:
    _log.error("held %s because its dead letter cannot be written: %s", where(message), error)

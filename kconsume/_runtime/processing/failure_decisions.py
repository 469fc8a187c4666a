"""Decides by the policy of a handler what happens to each failed record of one lane, and which letters to write.

The rules of a chunk ask for these decisions and yield the steps. This module writes and logs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kconsume._runtime.lanes.lane import Lane
from kconsume.errors import TooManyFailures
from kconsume.failures.letter_headers import LetterDraft, RetryTarget, cause_of
from kconsume.failures.policy import Policy, Verdict
from kconsume.failures.skip_log import Skipped
from kconsume.records import Message

if TYPE_CHECKING:
    from kconsume._runtime.processing.rules import ChunkRules


class FailureDecisions:
    """The decisions for one lane."""

    __slots__ = ("_lane", "_rules", "skipped_by_policy")

    def __init__(self, rules: ChunkRules, lane: Lane) -> None:
        self._rules = rules
        self._lane = lane
        self.skipped_by_policy = _skipped_by(rules.policy)
        """What happens to a record that the terminal action skips."""

    def verdict(self, error: BaseException) -> Verdict:
        """What happens to a record that failed with `error` and is not tried again in its place."""
        return Verdict.RETRY_LATER if self._retry_target(error) is not None else self._rules.policy.verdict(error)

    def stops(self, error: BaseException) -> bool:
        """True if a record that failed with `error` stops its lane."""
        return self.verdict(error) in (Verdict.STOP, Verdict.HOLD)

    def skipped_how(self, error: BaseException) -> Skipped:
        """What happens to a record that is skipped, for the log."""
        if (target := self._retry_target(error)) is not None:
            return Skipped(Verdict.RETRY_LATER, target.topic)
        return self.skipped_by_policy

    def drafts(
        self, part: Sequence[Message], errors: Mapping[int, BaseException], attempts: int
    ) -> dict[int, LetterDraft]:
        """The letters to write about records of `part`, by their index there.

        Args:
            part: the records.
            errors: the errors of the failed records, by index.
            attempts: how often they were tried.
        """
        drafts: dict[int, LetterDraft] = {}
        for index, error in errors.items():
            target = self._retry_target(error)
            if target is not None or self._rules.policy.dead_letter is not None:
                drafts[index] = self.draft(part[index], error, attempts, target)
        return drafts

    def draft(
        self, message: Message, error: BaseException, attempts: int, target: RetryTarget | None = None
    ) -> LetterDraft:
        """The letter about one record. It is a dead letter if there is no `target`."""
        group, lane = self._rules.group, self._lane
        return LetterDraft(message, cause_of(error), group, lane.scope, attempts, target, lane.reset_epoch)

    def too_many(self, error: BaseException) -> TooManyFailures:
        """The error for a record that would pass the limit of dead letters. `error` is why the record failed."""
        dead_letter = self._rules.policy.dead_letter
        assert dead_letter is not None
        fault = TooManyFailures(
            f"{self._rules.binding.name} failed on more records than limit={dead_letter.limit:g} of {dead_letter!r} "
            f"allows in {dead_letter.window:g} s, so this one was neither written nor passed: mend what fails, or "
            f"raise the limit"
        )
        fault.__cause__ = error
        return fault

    def _retry_target(self, error: BaseException) -> RetryTarget | None:
        """The retry topic for a record that failed with `error`; None if it is not tried again later."""
        chain = self._rules.retry_chain
        return None if chain is None else chain.next(self._lane.partition.topic, error)


def _skipped_by(policy: Policy) -> Skipped:
    dead_letter = policy.dead_letter
    if dead_letter is None:
        return Skipped(Verdict.SKIP)
    return Skipped(Verdict.DEAD_LETTER, dead_letter.topic or dead_letter.table)

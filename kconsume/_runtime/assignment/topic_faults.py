"""Errors of whole topics: each is an error of the configuration, or a reason to hold the partitions of the topic.

All methods are called on the owner thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future

from kconsume._event_log import EventLog
from kconsume._runtime.assignment.held_watch import SAY_EVERY
from kconsume._runtime.assignment.holds import Holds
from kconsume._runtime.assignment.owned_partitions import OwnedPartitions
from kconsume._runtime.deadlines import Deadline
from kconsume.errors import KconsumeError, NotAuthorized, TopicNotFound

_log = EventLog("loop")


class TopicFaults:
    """The faults of the topics of one consumer."""

    def __init__(self, partitions: OwnedPartitions, holds: Holds, has_had: Callable[[str], bool]) -> None:
        """partitions: the partitions of the consumer.

        Args:
            holds: holds partitions.
            has_had: whether a topic existed when this consumer surveyed the topics.
        """
        self._partitions = partitions
        self._holds = holds
        self._has_had = has_had
        self._survey: Future[None] | None = None
        """The survey of the topics that was sent last."""
        self._before_survey: dict[str, KconsumeError] = {}
        """Errors that the client reported before the survey was answered."""
        self._log_due: dict[str, Deadline] = {}
        """When the trouble of a topic may be logged again."""

    def survey_sent(self, survey: Future[None]) -> None:
        """Note that a survey was sent. Until the survey is answered, a topic that the client does not find may exist:
        not every broker knows a topic that has just been made."""
        self._survey = survey

    def survey_answered(self, survey: Future[None]) -> Mapping[str, KconsumeError]:
        """Return the faults that waited for this survey. Their partitions can be held now."""
        if survey is not self._survey:
            return {}
        faults, self._before_survey = self._before_survey, {}
        return faults

    def hold(self, faults: Mapping[str, KconsumeError], *, has_read: bool) -> None:
        """Hold the partitions of these topics. Raises if a topic never existed or could never be read, because that is
        an error in the configuration.

        Args:
            has_read: whether this consumer has read any topic.
        """
        for topic, fault in faults.items():
            if isinstance(fault, TopicNotFound) and not self._has_had(topic):
                if self._survey is None or self._survey.done():
                    raise fault
                self._before_survey[topic] = fault
                continue
            if isinstance(fault, NotAuthorized) and not has_read:
                raise fault
            concerned = [o for o in self._partitions.values() if o.partition.topic == topic]
            if not concerned:
                self._log_trouble(topic, fault)
            for owned in concerned:
                self._holds.put_on_hold(owned, fault, drains=isinstance(fault, NotAuthorized))

    def _log_trouble(self, topic: str, fault: KconsumeError) -> None:
        due = self._log_due.get(topic)
        if due is None or due.passed:
            self._log_due[topic] = Deadline(SAY_EVERY)
            _log.error("topic trouble", topic=topic, cause=fault, effect="this process has no partition of the topic")

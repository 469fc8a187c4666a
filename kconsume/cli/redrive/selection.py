"""Selects the dead letters that are sent back, and finds the handler that each belongs to.

Takes letters, and returns the chosen ones, with counts of the others and the reasons. Reads and sends nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import NamedTuple

import msgspec

from kconsume._kafka.outgoing import Outgoing
from kconsume._runtime.plan import ConsumerPlan
from kconsume.cli.app_parts import HandlerInApp
from kconsume.cli.letter_topics import Failing, failing_of
from kconsume.failures.letter_headers import PREFIX, Letter, redrive_topic
from kconsume.records import Headers

REDRIVEN = f"{PREFIX}redriven"


class Route(NamedTuple):
    """Where letters of a topic are sent back to, and the handler that reads them there."""

    part: HandlerInApp
    source: str
    """The topic that the handler names."""
    topic: str
    """The redrive topic through which letters return to the handler."""


class FoundLetter(NamedTuple):
    """A dead letter, and where it is."""

    place: str
    """The place of the letter, for `dlq show`."""
    letter: Letter
    at: datetime | None
    """The time for `--since` and `--until`: the time of the record in a topic, of the failure in a table."""
    marks: Headers
    """The headers that kconsume added to those of the record."""
    row: int = 0
    is_sent: bool = False
    """True if the letter was sent back, and the record has not failed since."""


class Chosen(NamedTuple):
    """A dead letter that is sent back."""

    found: FoundLetter
    route: Route

    @property
    def outgoing(self) -> Outgoing:
        return addressed(self.found.letter, self.route.topic, self.found.marks)


class Left(msgspec.Struct):
    """Dead letters that were selected and are not sent back; how many for each reason."""

    sent: int = 0
    """Letters that were sent back before and have not failed since, and further copies of one letter."""
    capped: int = 0
    """Letters that were sent back as often as `--cap` allows."""
    homeless: int = 0
    """Letters from topics for which no handler of the group takes letters back."""
    others: int = 0
    """Letters that failed in another group."""
    failing: int = 0
    """Letters on which today's handler still fails (with `--only-passing`)."""


@dataclass(frozen=True)
class Selection:
    """What the user asked for."""

    cause: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    key: str | None = None
    source: str | None = None
    origin: str | None = None
    cap: int = 3

    def takes(self, found: FoundLetter) -> bool:
        letter = found.letter
        return (
            self.cause in (None, letter.exception, letter.exception.rpartition(".")[2])
            and (self.key is None or letter.key == self.key.encode(errors="surrogateescape"))
            and self.source in (None, letter.partition.topic)
            and self.origin in (None, letter.origin, f"{letter.partition}@{letter.offset}")
            and (self.since is None or (found.at is not None and found.at >= self.since))
            and (self.until is None or (found.at is not None and found.at < self.until))
        )


@dataclass
class SelectedLetters:
    """The dead letters of one place that one group failed on."""

    group: str
    routes: Sequence[Route]
    selection: Selection
    passing: Collection[Failing] | None = None
    """The letters with which today's handler passes. None sends back all letters, without a trial."""
    left: Left = field(default_factory=Left)

    def of(self, letters: Iterable[FoundLetter]) -> Iterator[Chosen]:
        """Yield the letters that are sent back. Afterwards, `left` has the counts of the others."""
        self.left = Left()
        seen: set[Failing] = set()
        for found in filter(self.selection.takes, letters):
            letter = found.letter
            failing = failing_of(letter)
            if letter.group != self.group:
                self.left.others += 1
            elif found.is_sent or failing in seen:
                self.left.sent += 1
            elif letter.redriven >= self.selection.cap:
                self.left.capped += 1
            elif (route := self._route(letter)) is None:
                self.left.homeless += 1
            elif self.passing is not None and failing not in self.passing:
                self.left.failing += 1
            else:
                seen.add(failing)
                yield Chosen(found, route)

    def _route(self, letter: Letter) -> Route | None:
        """The route of the letter's topic, or else the only route, because the handler may have changed its topic."""
        fitting = [route for route in self.routes if route.source == letter.partition.topic]
        return fitting[0] if fitting else self.routes[0] if len(self.routes) == 1 else None


def routes_of(plans: Iterable[ConsumerPlan], group: str) -> list[Route]:
    """All routes of a group: handlers with a `DeadLetter` read what is sent back, unless they have `partitions=` or
    `pattern=`."""
    return [
        Route(HandlerInApp(plan, handler), source, redrive_topic(source, group))
        for plan in plans
        for handler in plan.handlers
        if plan.group == group and plan.partitions is None and handler.policy.dead_letter is not None
        for source in handler.options.topics
    ]


def addressed(letter: Letter, topic: str, marks: Headers | None = None) -> Outgoing:
    """The record to send back, unchanged, with the headers of the letter, which name its first place and its origin."""
    times = letter.redriven + 1
    if marks is None:
        marks = replace(letter, redriven=0).added_headers
    said = (*(pair for pair in marks if pair[0] != REDRIVEN), (REDRIVEN, str(times).encode()))
    return Outgoing(letter.value, letter.key, (*letter.headers, *said), topic, letter.timestamp)

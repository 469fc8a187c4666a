"""Which dead letters are sent back, and where to: what a person asked for, and the handler that a letter belongs to.

Pure: letters in, those that are chosen out, with a count of those that are left and why. Reading and sending are not
done here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import NamedTuple, TypeAlias

import msgspec

from kconsume.cli.rehearse import _Part
from kconsume.failures.letters import PREFIX, Letter, redrive_topic
from kconsume.output import Outgoing
from kconsume.records import Headers
from kconsume.runtime.plans import ConsumerPlan

REDRIVEN = f"{PREFIX}redriven"


Failing: TypeAlias = tuple[str, int, int]
"""What tells one failure of a record from the next: its origin, the reset under which it was read, and how often it had
been sent back."""


class Route(NamedTuple):
    """Where letters of a topic are sent back to, and who reads them there."""

    part: _Part
    source: str
    """The topic that the handler reads by itself."""
    topic: str
    """The one by which letters come back to it."""


class Found(NamedTuple):
    """A dead letter where it stands."""

    place: str
    """What `dlq show` takes for it."""
    letter: Letter
    at: datetime | None
    """What `--since` and `--until` go by: of a topic the record's time, of a table that of the failure."""
    marks: Headers
    """The headers that were added to the record's own."""
    row: int = 0
    is_sent: bool = False
    """Whether it was sent back, and has not failed since."""


class Chosen(NamedTuple):
    """A dead letter that is sent back."""

    found: Found
    route: Route

    @property
    def outgoing(self) -> Outgoing:
        return addressed(self.found.letter, self.route.topic, self.found.marks)


class Left(msgspec.Struct):
    """Dead letters that were asked for and are not sent back; how many for each reason."""

    sent: int = 0
    """They were sent back before, and have not failed since; or the same letter is there twice."""
    capped: int = 0
    """They were sent back as often as `--cap` allows."""
    homeless: int = 0
    """No handler of the group reads what is sent back for their topic."""
    others: int = 0
    """They failed in another group."""


@dataclass(frozen=True)
class Wish:
    """What a person asked for."""

    cause: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    key: str | None = None
    source: str | None = None
    origin: str | None = None
    cap: int = 3

    def takes(self, found: Found) -> bool:
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
class Choice:
    """The dead letters of one place that one group failed on."""

    group: str
    routes: Sequence[Route]
    wish: Wish
    left: Left = field(default_factory=Left)

    def of(self, letters: Iterable[Found]) -> Iterator[Chosen]:
        """Those that are sent back; `left` counts the others from 0."""
        self.left = Left()
        seen: set[Failing] = set()
        for found in filter(self.wish.takes, letters):
            letter = found.letter
            failing = letter.origin, letter.reset_epoch, letter.redriven
            if letter.group != self.group:
                self.left.others += 1
            elif found.is_sent or failing in seen:
                self.left.sent += 1
            elif letter.redriven >= self.wish.cap:
                self.left.capped += 1
            elif (route := self._route(letter)) is None:
                self.left.homeless += 1
            else:
                seen.add(failing)
                yield Chosen(found, route)

    def _route(self, letter: Letter) -> Route | None:
        """By the topic; where the handler reads another now, or read a topic of letters, by being the only one."""
        fitting = [route for route in self.routes if route.source == letter.partition.topic]
        return fitting[0] if fitting else self.routes[0] if len(self.routes) == 1 else None


def routes_of(plans: Iterable[ConsumerPlan], group: str) -> list[Route]:
    """All of a group: handlers with a `DeadLetter` read what is sent back, unless their partitions are chosen by a
    person, or their topics by a pattern."""
    return [
        Route(_Part(plan, handler), source, redrive_topic(source, group))
        for plan in plans
        for handler in plan.handlers
        if plan.group == group and plan.partitions is None and handler.policy.dead_letter is not None
        for source in handler.topics
    ]


def addressed(letter: Letter, topic: str, marks: Headers | None = None) -> Outgoing:
    """The record as it is sent back: as it was, with the letter's marks, so that its first place and origin stay."""
    times = letter.redriven + 1
    if marks is None:
        marks = replace(letter, redriven=0).marks
    said = (*(pair for pair in marks if pair[0] != REDRIVEN), (REDRIVEN, str(times).encode()))
    return Outgoing(letter.value, letter.key, (*letter.headers, *said), topic, letter.timestamp)

"""Stores that cannot take a name, each another one; see `broken_stores.py`.

A list of odd names is worth what the worst of them finds: for every name of the suites there is a store here that is
sound for all others.
"""

from __future__ import annotations

import fnmatch
import re
import unicodedata
from collections.abc import Callable, Iterable
from typing import Any

from kconsume.backends.memory import MemoryStore
from kconsume.records import Partition
from kconsume.testing.conformance import FencedSuite as F
from kconsume.testing.conformance import OffsetsSuite as L
from kconsume.testing.conformance import TransactionalSuite as T
from kconsume.testing.conformance.fenced import NAMES_THAT_MEET
from tests.contract.broken_stores import Broken, Renamed, fails_in
from tests.contract.queue_store import QueueStore, QueueTx

Use = Callable[[str], str]
"""What a store makes of a name before it uses it."""


def unfit(*marks: str) -> Use:
    """As if it were put into a statement, a key or a path with an f-string."""

    def use(name: str) -> str:
        if any(mark in name for mark in marks):
            raise Broken(f"syntax error near {name}")
        return name

    return use


def ascii_only(name: str) -> str:
    try:
        return name.encode("ascii").decode()
    except UnicodeEncodeError as error:
        raise Broken("no letter of ours") from error


UNFIT: dict[str, Use] = {
    "it's": unfit("'"),
    'say "hi"': unfit('"'),
    "a;drop table kconsume_offsets;--": unfit(";"),
    "ü/☕ b": ascii_only,
    "back\\slash": unfit("\\"),
    "a\nb": unfit("\n"),
    "a:b:c": unfit(":"),
    "x ": unfit("x "),
    "{tag}": unfit("{tag}"),
    "?[a-z]": unfit("["),
    "$1 %s {0}": unfit("{0}"),
    "../up": unfit(".."),
}


def refuse(name: str, use: Use) -> None:
    """Three stores, of which the first cannot take it as a group, the second as a topic, the third as a lock."""

    @fails_in(name, L.test_a_group_may_have_any_name)
    class Group(Renamed):
        def name(self, group: str) -> str:
            return use(group)

    @fails_in(name, F.test_a_topic_may_have_any_name)
    class Topic(Renamed):
        def topic(self, partition: Partition) -> Partition:
            return partition._replace(topic=use(partition.topic))

    @fails_in(name, T.test_a_transaction_works_with_any_group_and_topic_name)
    class Lock(QueueStore):
        def begin(self, group: str, partition: Partition, epoch: int) -> None:
            super().begin(use(group), partition, epoch)


for odd, use in UNFIT.items():
    refuse(odd, use)


# Names that mean others too


def like(pattern: str, name: str) -> bool:
    """As SQL compares."""
    return re.fullmatch(re.escape(pattern).replace("%", ".*"), name, re.DOTALL) is not None


def glob(pattern: str, name: str) -> bool:
    """As Redis looks for keys."""
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]").replace("?", "[?]"))


def means_others(name: str, matches: Callable[[str, str], bool]) -> None:
    @fails_in(name, L.test_a_group_may_have_any_name, F.test_a_topic_may_have_any_name)
    class Deleted(MemoryStore):
        def delete(self, group: str, partitions: Iterable[Partition] | None = None) -> None:
            topics = None if partitions is None else [p.topic for p in partitions]
            for of, partition in list(self._rows):
                if matches(group, of) and (topics is None or any(matches(t, partition.topic) for t in topics)):
                    super().delete(of, [partition])

    @fails_in(name, T.test_a_transaction_works_with_any_group_and_topic_name)
    class Moved(QueueStore):
        def end(self, group: str, partition: Partition, epoch: int, tx: QueueTx) -> None:
            super().end(group, partition, epoch, tx)
            for of, other in list(self._rows):
                if of != group and matches(group, of):
                    self._rows[of, other] = self._rows[group, partition]


means_others("%", like)
means_others("*", glob)


# Names that look alike

JOINED, FOLDED, TRIMMED, COMPOSED = NAMES_THAT_MEET


@fails_in(JOINED, F.test_similar_names_have_separate_rows)
class Joined(Renamed):
    """A key made of group and topic, of which nobody can tell where the one ends."""

    def name(self, group: str) -> str:
        self._group: Any = group
        return "all"

    def topic(self, partition: Partition) -> Partition:
        return Partition(f"{self._group}:{partition.topic}", partition.number)


@fails_in(FOLDED, F.test_similar_names_have_separate_rows)
class Folded(Renamed):
    def name(self, group: str) -> str:
        return group.lower()


@fails_in(TRIMMED, F.test_similar_names_have_separate_rows)
class Trimmed(Renamed):
    def name(self, group: str) -> str:
        return group.rstrip()


@fails_in(COMPOSED, F.test_similar_names_have_separate_rows)
class Composed(Renamed):
    def topic(self, partition: Partition) -> Partition:
        return partition._replace(topic=unicodedata.normalize("NFC", partition.topic))

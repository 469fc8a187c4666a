"""Asks the cluster about topics, before the consumer joins its group and while it runs.

Blocking; runs on the background thread. Errors of the configuration are raised; errors of single topics are returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kconsume._kafka.cluster import Cluster
from kconsume._runtime.assignment.claims import Claims
from kconsume._runtime.assignment.partition_trouble import NOT_SKIPPED, choices
from kconsume.errors import (
    BrokerUnavailable,
    ClientFailed,
    ConfigurationError,
    KconsumeError,
    StoreUnavailable,
    TopicNotFound,
    TopicRecreated,
)


class TopicChecks:
    """Checks of one consumer's topics against the cluster.

    Fields: written on the background thread, read on the owner thread. `last_error` is also read on the thread that
    waits for the start. Each field is set in one step and needs no lock.
    """

    def __init__(self, cluster: Cluster, group: str, claims: Claims) -> None:
        self.seen: set[str] = set()
        """Topics that existed at the survey. If one of them is deleted later, its partitions are held."""
        self.store_answered = False
        """Whether the store has answered the survey."""
        self.last_error: BaseException | None = None
        """The error because of which the survey was not answered."""
        self.waits_for_topics = False
        """Whether no topic matches the patterns yet. Until one does, the client does not join its group."""
        self._cluster = cluster
        self._group = group
        self._claims = claims

    def survey(self, topics: Iterable[str], matches: Callable[[str], bool] | None = None) -> None:
        """Read the topics and the stored offsets before the consumer joins. Raises `TopicNotFound` if a named topic
        does not exist.

        The store must be asked before the join. Later it would also show the partitions that other members of a new
        group have claimed, and the remaining partitions of the topic would look as if they had been added.

        Args:
            topics: the named topics.
            matches: for a consumer that names no topic, whether its patterns match a topic.
        """
        there = self._cluster.topics(sorted(topics))
        self.seen.update(there)
        self._claims.note_partition_counts(there)
        try:
            self.waits_for_topics = matches is not None and not any(map(matches, self._cluster.all_topics()))
            self._claims.read_stored_partitions()
        except (StoreUnavailable, BrokerUnavailable) as error:
            self.last_error = error  # the first claim asks again; without a claim, `check_topics` asks again
        else:
            self.store_answered, self.last_error = True, None

    def _survey_again(self, topics: Sequence[str]) -> None:
        """Repeat the survey without the topics that were deleted since; `check_topics` reports those."""
        try:
            self.survey(self._cluster.those_there(topics))
        except TopicNotFound:
            return  # a topic was deleted at this moment; the next check asks again

    def make_topics(self, wanted: Mapping[str, str]) -> None:
        """Make the topics that do not exist.

        Args:
            wanted: by topic to make, the topic whose partition count and settings it gets.
        """
        self._cluster.make_topics(wanted)

    def must_be_alone(self) -> None:
        """Raise if the group has members. Needed for `partitions=`, which claims partitions that the group would assign
        to its members."""
        try:
            group = self._cluster.group(self._group)
        except ClientFailed:
            return  # the embedded broker does not know; a user without the right to ask does not use the group
        if group is not None and group.members:
            raise ConfigurationError(
                f"group {self._group!r} has members ({', '.join(sorted(m.client for m in group.members)[:3])}), which "
                f"share its partitions, and partitions= claims partitions without joining: give this handler a group= "
                f"of its own, or stop the others first"
            )

    def check_topics(self, known: Mapping[str, str], named: Sequence[str] = ()) -> dict[str, KconsumeError]:
        """The errors of topics: a named topic does not exist, or a topic that we claimed has another id.

        If the cluster does not answer, no error is returned. If the survey was not answered, it is repeated first.

        Args:
            known: the ids of topics that we claimed.
            named: the topics that handlers name.
        """
        found: dict[str, KconsumeError] = {}
        try:
            if self.last_error is not None:
                self._survey_again(named)
            for topic in named:
                try:
                    self._cluster.topics([topic])
                except TopicNotFound as error:
                    found[topic] = error
            ids = self._ids_of(known) if known else {}
        except BrokerUnavailable:
            return {}
        for topic, topic_id in known.items():
            now = ids.get(topic)
            if now is not None and now != topic_id:
                found[topic] = TopicRecreated(
                    f"topic {topic!r} had id {topic_id} and now has {now}: it was deleted and made again while it was "
                    f"consumed. {NOT_SKIPPED} {choices(self._group)}"
                )
        return found

    def _ids_of(self, topics: Iterable[str]) -> Mapping[str, str | None]:
        try:
            return self._cluster.topic_ids(topics)
        except TopicNotFound:
            return {}  # a topic that matched a pattern was deleted, which is no fault

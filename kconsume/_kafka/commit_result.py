"""Offsets that are sent to the group, and what the broker's answer to them means.

An answer is judged by its error code: the flags of a commit error are never set (measured). This file calls no broker.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from confluent_kafka import KafkaError

from kconsume._kafka.fetched import FetchedMessages
from kconsume.errors import GroupRefused, KconsumeError
from kconsume.records import Partition

# The commit met a rebalance or a coordinator that moved. The next commit repeats the offset of an owned partition.
_REPEATED_LATER = {
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError._WAIT_COORD,
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError.STALE_MEMBER_EPOCH,
}
# The broker does not know this member, or has removed it. The client's rebalance callbacks follow.
_NOT_A_MEMBER = {
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.FENCED_MEMBER_EPOCH,
    KafkaError._NO_OFFSET,
    KafkaError._ASSIGNMENT_LOST,
}
# The topic was deleted, or this client may not read it. Only the partitions of that topic are held.
_ABOUT_THE_TOPIC = {KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.UNKNOWN_TOPIC_OR_PART}

# The answer to a consumer that never joined: the group has members by now, and only they may commit.
_GROUP_HAS_MEMBERS = {KafkaError.ILLEGAL_GENERATION, KafkaError.UNKNOWN_MEMBER_ID}

# The answer to a commit that was on its way while the group rebalanced. A member that keeps working gets this answer
# until it knows the new generation.
_MET_REBALANCE = {
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.STALE_MEMBER_EPOCH,
}


class OffsetToCommit(NamedTuple):
    offset: int
    leader_epoch: int | None
    metadata: str


class CommitResult(NamedTuple):
    """The broker's answer to a commit. An accepted offset also confirms that this process is a member."""

    offsets: dict[Partition, int]
    error: str | None
    refusal: KconsumeError | None = None
    """Why a later commit of the same offsets would be refused too."""
    refused: Mapping[Partition, KconsumeError | None] = {}
    """The partitions whose offset was refused, each with an error if the cause is that partition alone."""
    generation: int = -1
    """The group's generation when the answer came."""
    number: int = 0
    """The number that the commit carries in its metadata (`commit_metadata.numbered`)."""
    met_rebalance: bool = False
    """True if the commit was refused only because of a rebalance. The next commit is sent under the new generation."""


def met_rebalance(refused: Mapping[Partition, KafkaError]) -> bool:
    """Return whether offsets were refused, and each of them only because the group rebalanced."""
    return bool(refused) and all(error.code() in _MET_REBALANCE for error in refused.values())


def lasting_refusal(
    error: KafkaError, *, group: object, subscribed: bool, fetched: FetchedMessages
) -> KconsumeError | None:
    """Return why a later commit would be refused too, or None if it may be accepted.

    Args:
        error: the broker's answer.
        group: the name of the group.
        subscribed: whether this consumer is a member of the group. A consumer with `partitions=` is not.
        fetched: has the reason if the client gave up.
    """
    code = error.code()
    if not subscribed and code in _GROUP_HAS_MEMBERS:
        return GroupRefused(
            f"group {group!r} has members, who share its partitions, so it takes no offsets from a handler "
            f"with partitions= ({error.str()}); records since its last commit are handled again: give this "
            f"handler a group= of its own, or stop the others and start it again"
        )
    if code in _REPEATED_LATER or code in _NOT_A_MEMBER or code in _ABOUT_THE_TOPIC:
        return None
    if code == KafkaError._FATAL:
        return fetched.death  # the client gave up, and may not have reported the cause yet
    return fetched.refusal(error, "the broker refused the offset commit")

"""Error answers to the requests of `Cluster`, and the messages for users. Values only."""

from __future__ import annotations

from confluent_kafka import KafkaError

from kconsume.errors import BrokerUnavailable, ClientFailed, KconsumeError, StoreError, TopicNotFound

_NOT_ALLOWED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
}
# No broker answers, or a leader or coordinator is being elected: asking again may help.
AWAY = {
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._RESOLVE,
    KafkaError._TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError._TRANSPORT,
    KafkaError._WAIT_COORD,
    KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError.NOT_CONTROLLER,
    KafkaError.NOT_COORDINATOR,
    KafkaError.NOT_ENOUGH_REPLICAS,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.UNSTABLE_OFFSET_COMMIT,
}
COORDINATOR_ELECTION = {
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
}
"""The group has no coordinator yet."""
# How a group that has members answers a client that is not a member.
_HAS_MEMBERS = {
    KafkaError.FENCED_MEMBER_EPOCH,
    KafkaError.GROUP_SUBSCRIBED_TO_TOPIC,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.NON_EMPTY_GROUP,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.STALE_MEMBER_EPOCH,
    KafkaError.UNKNOWN_MEMBER_ID,
}


def no_answer(error: KafkaError) -> bool:
    """Whether the client got no answer. The codes of brokers are above 0, the client's own are below."""
    return error.code() in AWAY and error.code() < 0


def refusal(error: KafkaError, brokers: str, group: str | None) -> KconsumeError:
    """Return the error for an answer of a broker.

    Args:
        error: the answer.
        brokers: the address of the brokers.
        group: the group, if the request was to change one.
    """
    if error.code() in AWAY:
        return BrokerUnavailable(
            f"the cluster at {brokers} cannot answer yet ({error.str()}): a leader or a coordinator is being "
            f"elected; if this lasts, look at the brokers' log"
        )
    if group is not None and error.code() in _HAS_MEMBERS:
        return StoreError(
            f"group {group!r} has members, so the broker takes offsets only from them ({error.str()}), and nothing "
            f"was changed: stop them first, or move a running app with app.seek"
        )
    if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
        return TopicNotFound(
            f"the cluster at {brokers} does not know the topic ({error.str()}): create it, or correct its name"
        )
    if error.code() in _NOT_ALLOWED:
        return ClientFailed(
            f"the cluster at {brokers} does not allow the request ({error.str()}): give the principal Describe and "
            f"Read on the topics and the group"
        )
    return ClientFailed(f"the cluster at {brokers} refused the request: {error.str()} ({error.name()})")

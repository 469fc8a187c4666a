"""Retention of topics: turns off deletion by age, and deletes records up to an offset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource, ConfigSource
from confluent_kafka.admin._resource import ResourceType

from kconsume._config.client_settings import ClientValue, connection_settings
from kconsume.errors import BrokerUnavailable, ClientFailed, ConfigurationError
from kconsume.records import Partition

RETENTION = "retention.ms"

_PATIENCE = 10.0
_UNSUPPORTED = (KafkaError._UNSUPPORTED_FEATURE, KafkaError.UNSUPPORTED_VERSION)
_NOT_ALLOWED = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED)
_AWAY = (KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE)


def keep_old_records(brokers: str, overrides: Mapping[str, ClientValue], topics: Sequence[str]) -> str | None:
    """Set `retention.ms=-1` for the given topics that delete by the time of their records.

    A setting that was made for the topic is kept. If the cluster does not allow the client to read or change the
    settings, old records may be deleted, and the refusal is returned; otherwise None. A test broker that does not know
    these requests deletes nothing.
    """
    admin = AdminClient(connection_settings(brokers, overrides))
    resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
    try:
        described = admin.describe_configs(resources, request_timeout=_PATIENCE)
        by_age = [r for r in resources if _deletes_by_age(described[r].result(_PATIENCE + 1))]
        keep = ConfigEntry(RETENTION, "-1", incremental_operation=AlterConfigOpType.SET)
        changed = [ConfigResource(ResourceType.TOPIC, r.name, incremental_configs=[keep]) for r in by_age]
        for future in admin.incremental_alter_configs(changed, request_timeout=_PATIENCE).values() if changed else ():
            future.result(_PATIENCE + 1)
    except KafkaException as error:
        refusal: KafkaError = error.args[0]
        if refusal.code() in _UNSUPPORTED:
            return None
        if refusal.code() not in _NOT_ALLOWED:
            raise BrokerUnavailable(f"the settings of {', '.join(topics)} cannot be read ({refusal.str()})") from error
        return refusal.str()
    return None


def _deletes_by_age(entries: Mapping[str, ConfigEntry]) -> bool:
    """True if the topic deletes by the time of its records, and has no retention setting of its own."""
    retention, kind = entries[RETENTION], entries["message.timestamp.type"]
    is_set = ConfigSource(retention.source) is ConfigSource.DYNAMIC_TOPIC_CONFIG
    return not is_set and retention.value != "-1" and kind.value != "LogAppendTime"


def delete_records(brokers: str, overrides: Mapping[str, ClientValue], ends: Mapping[Partition, int]) -> None:
    """Delete the records of each partition below an offset, permanently.

    Args:
        ends: by partition, the first offset that stays.
    """
    admin = AdminClient(connection_settings(brokers, overrides))
    asked = admin.delete_records(
        [TopicPartition(*partition, end) for partition, end in ends.items()], request_timeout=_PATIENCE
    )
    for where, future in asked.items():
        try:
            future.result(_PATIENCE + 1)
        except KafkaException as error:
            raise _not_deleted(Partition(where.topic, where.partition), error.args[0]) from error


def _not_deleted(partition: Partition, error: KafkaError) -> Exception:
    what = f"records of {partition} cannot be deleted ({error.str()})"
    if error.code() in _UNSUPPORTED:
        return ConfigurationError(f"{what}: this broker does not delete records; the topic's retention deletes them")
    if error.code() in _NOT_ALLOWED:
        return ConfigurationError(f"{what}: give the principal Delete on the topic")
    if error.code() == KafkaError.POLICY_VIOLATION:
        return ConfigurationError(f"{what}: a topic that only compacts keeps its records; set cleanup.policy=delete")
    if error.code() in _AWAY:
        return BrokerUnavailable(f"{what}: check the brokers, and run it again")
    return ClientFailed(what)

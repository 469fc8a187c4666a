"""The topics by which dead letters come back to their group: made like the topics that they came from, and kept.

A record is sent back with its own timestamp. A topic that deletes by age would delete an old one before it is read, and
with it the knowledge that it was sent: so nothing is deleted by age there, unless somebody has said otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable

import click
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource, ConfigSource
from confluent_kafka.admin._resource import ResourceType

from kconsume.app import App
from kconsume.cli.redrive_choice import Route
from kconsume.cluster import Cluster
from kconsume.errors import BrokerUnavailable, ConfigurationError
from kconsume.output import is_topic_name
from kconsume.settings import connection_settings

_PATIENCE = 10.0
_RETENTION = "retention.ms"
_CANNOT = (KafkaError._UNSUPPORTED_FEATURE, KafkaError.UNSUPPORTED_VERSION)
_MAY_NOT = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED)


def those_there(app: App, routes: Iterable[Route]) -> list[str]:
    """Of the topics, those that the cluster has."""
    return Cluster(app._address(), app.kafka).those_there(sorted({route.topic for route in routes}))


def made(app: App, routes: Iterable[Route]) -> dict[str, int]:
    """Each topic, with the number of its partitions. Makes those that are not there."""
    wanted = {route.topic: route.source for route in routes}
    if not wanted:
        return {}
    for topic, source in wanted.items():
        if not is_topic_name(topic):
            raise ConfigurationError(
                f"{topic!r} would be the topic by which letters come back, and is no name of one: give the handler of "
                f"{source!r} a group= of at most {249 - len(topic) + len(wanted)} of a-z A-Z 0-9 . _ -"
            )
    if app.brokers.startswith("embedded://"):
        return Cluster(app._address(wanted), app.kafka).topics(sorted(wanted))
    cluster = Cluster(app.brokers, app.kafka)
    there = cluster.those_there(wanted)
    cluster.make_topics(wanted)
    _keep_all(app, sorted(wanted), is_new=set(there) != set(wanted))
    return cluster.topics(sorted(wanted))


def _keep_all(app: App, topics: list[str], *, is_new: bool) -> None:
    admin = AdminClient(connection_settings(app.brokers, app.kafka))
    resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
    try:
        described = admin.describe_configs(resources, request_timeout=_PATIENCE)
        ageing = [r for r in resources if _ages(described[r].result(_PATIENCE + 1))]
        keep = ConfigEntry(_RETENTION, "-1", incremental_operation=AlterConfigOpType.SET)
        changed = [ConfigResource(ResourceType.TOPIC, r.name, incremental_configs=[keep]) for r in ageing]
        for future in admin.incremental_alter_configs(changed, request_timeout=_PATIENCE).values() if changed else ():
            future.result(_PATIENCE + 1)
    except KafkaException as error:
        refusal = error.args[0]
        if refusal.code() in _CANNOT:
            return  # a broker for tests, which deletes nothing
        if refusal.code() not in _MAY_NOT:
            raise BrokerUnavailable(f"the settings of {', '.join(topics)} cannot be read ({refusal.str()})") from error
        unsure = (
            f"the cluster at {app.brokers} does not let this client see to it that {', '.join(topics)} deletes nothing "
            f"by age ({refusal.str()}), so an old record may be deleted before it is read: set {_RETENTION}=-1 for the "
            f"topic, or give the principal DescribeConfigs and AlterConfigs on it"
        )
        if is_new:
            raise ConfigurationError(unsure) from error
        click.echo(f"warning: {unsure}", err=True)


def _ages(entries: dict[str, ConfigEntry]) -> bool:
    """Whether it deletes by the time of its records, and nobody has said so for this topic."""
    retention, kind = entries[_RETENTION], entries["message.timestamp.type"]
    is_said = ConfigSource(retention.source) is ConfigSource.DYNAMIC_TOPIC_CONFIG
    return not is_said and retention.value != "-1" and kind.value != "LogAppendTime"

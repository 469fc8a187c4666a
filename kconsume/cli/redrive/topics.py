"""Creates the redrive topics, through which dead letters return to their group. A redrive topic has as many partitions
and replicas as the topic of the records.

A record is sent back with its own timestamp. If the redrive topic deleted records by age, it could delete an old record
before the group reads it, and with it the proof that the record was sent. So a redrive topic deletes nothing by age,
unless a user has set its retention.
"""

from __future__ import annotations

from collections.abc import Iterable

import click

from kconsume._kafka.cluster import Cluster
from kconsume._kafka.outgoing import is_topic_name
from kconsume._kafka.topic_retention import RETENTION, keep_old_records
from kconsume.app import App
from kconsume.cli.redrive.selection import Route
from kconsume.errors import ConfigurationError


def existing(app: App, routes: Iterable[Route]) -> list[str]:
    """The topics of these routes that the cluster has."""
    return Cluster(app.declared.bootstrap_servers(), app.kafka).those_there(sorted({route.topic for route in routes}))


def made(app: App, routes: Iterable[Route]) -> dict[str, int]:
    """Each topic of these routes, with the number of its partitions. Creates missing topics."""
    wanted = {route.topic: route.source for route in routes}
    if not wanted:
        return {}
    for topic, source in wanted.items():
        if not is_topic_name(topic):
            raise ConfigurationError(
                f"{topic!r} would be the redrive topic, and is not a valid topic name: give the handler "
                f"of {source!r} a group= of at most {249 - len(topic) + len(wanted)} characters of a-z A-Z 0-9 . _ -"
            )
    if app.brokers.startswith("embedded://"):
        return Cluster(app.declared.bootstrap_servers(wanted), app.kafka).topics(sorted(wanted))
    cluster = Cluster(app.brokers, app.kafka)
    there = cluster.those_there(wanted)
    cluster.make_topics(wanted)
    _keep_old_records(app, sorted(wanted), is_new=set(there) != set(wanted))
    return cluster.topics(sorted(wanted))


def _keep_old_records(app: App, topics: list[str], *, is_new: bool) -> None:
    refusal = keep_old_records(app.brokers, app.kafka, topics)
    if refusal is None:
        return
    unsure = (
        f"the cluster at {app.brokers} does not let this client make sure that {', '.join(topics)} deletes nothing by "
        f"age ({refusal}), so an old record may be deleted before it is read: set {RETENTION}=-1 for the topic, or "
        f"give the principal DescribeConfigs and AlterConfigs on it"
    )
    if is_new:
        raise ConfigurationError(unsure)
    click.echo(f"warning: {unsure}", err=True)

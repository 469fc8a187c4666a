"""The parts of an app that a command works on: the handler of a topic, and the consumer that would run it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from kconsume._runtime.dry_run import DryRun, DryRunResources
from kconsume._runtime.plan import ConsumerPlan, HandlerPlan
from kconsume._runtime.processing.dry_run_tx import rolled_back_connection
from kconsume.app import App
from kconsume.errors import ConfigurationError
from kconsume.failures.policy import Policy


class HandlerInApp(NamedTuple):
    """A handler with the consumer that it belongs to."""

    consumer: ConsumerPlan
    handler: HandlerPlan


def handler_of(app: App, topic: str, name: str | None) -> HandlerInApp:
    """Return the only handler of a topic. Raises `ConfigurationError` if there are none or several.

    Args:
        topic: the topic of the records.
        name: the handler's name; needed if handlers of several groups take the topic.
    """
    parts = [
        HandlerInApp(consumer, handler)
        for consumer in app.plans()
        for handler in consumer.handlers
        if handler.wanted.takes(topic) and name in (None, handler.binding.name)
    ]
    if len(parts) == 1:
        return parts[0]
    if parts:
        names = " or ".join(part.handler.binding.name for part in parts)
        raise ConfigurationError(f"topic {topic!r} has {len(parts)} handlers: choose one with --handler {names}")
    handled = sorted({t for registration in app.registrations for t in registration.topics})
    which = "no handler" if name is None else f"no handler {name!r}"
    raise ConfigurationError(f"the app has {which} for topic {topic!r}: it handles {', '.join(handled)}")


def record_scope(consumer: ConsumerPlan, topic: str) -> str:
    """The prefix of `Record.id`, `group:topic_id`, the same as in a run."""
    return f"{consumer.group}:{consumer.cluster.topic_ids([topic])[topic] or topic}"


def dry_run(app: App, part: HandlerInApp, scope: str, built: Mapping[object, object] | None = None) -> DryRun:
    """Return a `DryRun`, which runs a handler on records of one topic, in transactions that are rolled back.

    Args:
        scope: the prefix of the records' ids (`record_scope`).
        built: resources that are built already. The others are built for each run.
    """
    declared = app.declared
    resources = DryRunResources(declared.resources, {**declared.ready_resources, **(built or {})}, app.shutdown)
    return DryRun(
        # With "stop", an error is always reported. The handler's own policy may retry or skip the record.
        dataclasses.replace(part.handler, policy=Policy("stop")),
        scope,
        resources,
        rolled_back_connection(part.consumer.store, part.handler.binding),
        declared.max_message_bytes,
    )

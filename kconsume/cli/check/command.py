"""`kconsume check`: shows the handlers of an app, their guarantees, and problems of its configuration.

Gathers facts, and shows them with the findings that `cli/check/findings.py` derives from them. Consumes nothing and
joins no group. Asks the cluster for its topics, and the stores for their settings and the app's offsets.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Literal

import click
import msgspec

from kconsume._config.client_settings import (
    DEFAULTS,
    FORBIDDEN,
    MASK,
    ClientValue,
    Default,
    client_settings,
    masked,
    masked_address,
)
from kconsume._config.client_settings import EMBEDDED as EMBEDDED_DEFAULTS
from kconsume._config.group_protocol import protocol_of
from kconsume._console import guarantee, sending
from kconsume._handlers.annotations import text_of
from kconsume._handlers.registration import Registration
from kconsume._kafka.cluster import Cluster
from kconsume._kafka.settings_check import check_settings
from kconsume._runtime.build import most_workers
from kconsume._runtime.plan import budget_for
from kconsume.app import App
from kconsume.backends import OffsetStore, SqliteStore
from kconsume.backends.capabilities import capabilities_of
from kconsume.cli.app_loader import VARIABLE, load
from kconsume.cli.check import findings, postgres, redis
from kconsume.cli.check import offsets as stored
from kconsume.cli.check.findings import EMBEDDED, Budgets, ClientFacts, ClusterFacts, Finding, Handler
from kconsume.cli.options import app_argument, json_option
from kconsume.errors import BrokerUnavailable, KconsumeError, TopicNotFound

_PATIENCE = 4.0


class Property(msgspec.Struct):
    """One property of the Kafka client, as a run would set it. A secret value is masked."""

    name: str
    value: ClientValue
    set_by: Literal["you", "app", "kconsume", "promise"]
    """`you`: `App(kafka={...})`; `app`: another argument of `App`; `kconsume`: a default of kconsume; `promise`: fixed,
    because a promise of kconsume depends on the value."""
    librdkafka: ClientValue | None = None
    """The client's own default, if `value` is different."""
    kconsume: ClientValue | None = None
    """The default of kconsume, if `value` is different."""
    why: str | None = None


class CheckReport(msgspec.Struct):
    """The result of `check`, which `--json` prints."""

    app: str
    brokers: str
    group: str
    ok: bool
    """True if no finding is an error."""
    findings: list[Finding]
    handlers: list[Handler]
    topics: dict[str, int | None] | None
    """The number of partitions of each topic, None for a missing topic. `topics` is None if no broker answered."""
    shutdown: float
    revoke: float | None
    """Seconds in which a revoked partition must be drained; None if the client refuses its configuration."""
    protocol: str
    """The rebalance protocol of the group: eager, cooperative or consumer."""
    memory: int
    kafka: list[Property]


@click.command(short_help="Show handlers, their guarantees, and problems to correct.")
@app_argument
@click.option("--offline", is_flag=True, help="Ask neither the brokers nor the stores.")
@json_option
@click.pass_context
def check(context: click.Context, app: str | None, offline: bool, as_json: bool) -> None:
    """Show the handlers of APP, their guarantees, and problems to correct.

    Shows each handler with its guarantee, the topics, and the configuration of the Kafka client. Shows why a default of
    kconsume differs from the client's. Then lists findings, each with a fix: settings that contradict each other or
    will cause harm, missing topics, stored offsets that are not in the log. Consumes nothing, and masks secrets.

    \b
      kconsume check shop:app
      kconsume check shop:app --offline          in CI, without brokers and stores
      kconsume check shop:app --json | jq .findings

    Exit code 0 if no finding is an error, else 2.
    """
    report = examine(load(app), os.environ[VARIABLE], offline=offline)
    if as_json:
        click.echo(msgspec.json.encode(report))
    else:
        from kconsume.cli.check.render import show

        show(report)
    context.exit(0 if report.ok else 2)


def examine(app: App, name: str, *, offline: bool = False) -> CheckReport:
    """Gather the facts about an app, and derive the findings.

    Args:
        name: the app's name, as in shop:app.
        offline: ask neither the cluster nor the stores.
    """
    embedded = app.brokers.startswith(EMBEDDED)
    settings = client_settings(app.brokers, app.group, app.kafka, instance=app.instance, embedded=embedded)
    client = _ask_client(settings)
    address = _address(app.brokers)
    handlers = [_handler(registration) for registration in app.registrations]
    cluster, rows = ClusterFacts(), stored.Rows()
    if not offline and address is not None:
        asked = Cluster(address, app.kafka, patience=_PATIENCE)
        cluster = _ask_cluster(app, asked, embedded)
        if cluster.unreachable is None:
            rows = stored.ask(app, asked)
    found = [
        *findings.of_app(app.brokers, handlers, running=address is not None),
        *findings.of_budgets(settings, Budgets(app.shutdown, app.memory), embedded=embedded),
        *findings.of_handlers(handlers, embedded=embedded),
        *findings.of_cluster(handlers, cluster),
        *(findings.of_groups(settings, cluster) if client.refused is None else ()),
        *postgres.of_stores([registration.store for registration in app.registrations], offline=offline),
        *redis.of_stores([registration.store for registration in app.registrations], offline=offline),
        *findings.of_environment(app.unknown_variables()),
    ]
    unusable = {finding.about for finding in found if finding.level == "error"}
    found += findings.of_offsets(rows.found, {s: why for s, why in rows.unread.items() if s not in unusable})
    found = findings.ordered([*findings.of_client(client), *found])
    return CheckReport(
        app=name,
        brokers=app.brokers,
        group=app.group,
        ok=not any(finding.level == "error" for finding in found),
        findings=found,
        handlers=handlers,
        topics=None if cluster.topics is None else dict(cluster.topics),
        shutdown=app.shutdown,
        revoke=_revoke_budget(app, settings) if client.refused is None else None,
        protocol=str(protocol_of(settings)),
        memory=app.memory,
        kafka=_properties(settings, app.kafka, embedded=embedded),
    )


def _handler(registration: Registration) -> Handler:
    binding, store, batching = registration.binding, registration.store, registration.batching
    options = registration.options
    transaction = binding.transaction
    return Handler(
        name=registration.name,
        topics=registration.topics,
        group=registration.group,
        store=masked_address(registration.store_address),
        gets=binding.payload,
        transaction=None if transaction is None else f"{transaction.__module__}.{transaction.__qualname__}",
        transactional_store=capabilities_of(store).transactional is not None,
        guarantee=_guarantee_of(registration),
        own_guarantee=registration.own_guarantee is not None,
        on_error=str(registration.policy),
        start=options.start,
        order=options.order,
        executor=registration.executor,
        concurrency=options.concurrency,
        workers=most_workers(registration.plan(), store),
        chunk=options.chunk,
        batch=None if batching is None else f"{batching.records} records, or what came in {batching.wait:g} s",
        rate=None if options.rate is None else f"{options.rate.records} records in {options.rate.per:g} s",
        timeout=options.timeout,
        resources=tuple(text_of(hint) for hint in binding.resources.values()),
        sends=binding.sends,
        sending=sending(registration) if binding.sends else "",
        to=binding.to,
        partitions=registration.partitions,
        pattern=registration.pattern,
        store_trouble=_trouble(store),
    )


def _revoke_budget(app: App, settings: Mapping[str, ClientValue]) -> float:
    return max((budget_for(settings, r.store, app.shutdown) for r in app.registrations), default=0.0)


def _guarantee_of(registration: Registration) -> str:
    sentence = guarantee(registration)
    if registration.binding.transaction is None or registration.own_guarantee is not None:
        return sentence
    return f"{sentence}; what it does elsewhere (a call, a file) is at least once"


def _trouble(store: OffsetStore) -> str | None:
    return store.trouble() if isinstance(store, SqliteStore) else None


# The client


def _ask_client(settings: Mapping[str, ClientValue]) -> ClientFacts:
    """The client's errors and warnings about its configuration, with secrets masked."""
    verdict = check_settings(settings)
    refused = None if verdict.refused is None else _without_secrets(verdict.refused, settings)
    return ClientFacts(refused, tuple(_without_secrets(warning, settings) for warning in verdict.warnings))


def _without_secrets(text: str, settings: Mapping[str, ClientValue]) -> str:
    covered = masked(settings)
    for name, value in settings.items():
        if covered[name] == MASK and str(value):
            text = text.replace(str(value), MASK)
    return text


def _properties(
    settings: Mapping[str, ClientValue], overrides: Mapping[str, ClientValue], *, embedded: bool
) -> list[Property]:
    """Every property of the client: first those that the user has set, then the others."""
    defaults = {default.name: default for default in DEFAULTS}
    properties = []
    for name, value in sorted(masked(settings).items(), key=lambda item: item[0] not in overrides):
        default = defaults.get(name)
        ours = EMBEDDED_DEFAULTS[name] if embedded and name in EMBEDDED_DEFAULTS else default and default.value
        librdkafka = default and default.librdkafka
        set_by = _set_by(name, overrides)
        properties.append(
            Property(
                name=name,
                value=_shown(value),
                set_by=set_by,
                librdkafka=None if librdkafka == value else librdkafka,
                kconsume=None if ours == value else ours,
                why=_why(name, default, set_by, embedded=embedded),
            )
        )
    return properties


def _shown(value: object) -> ClientValue:
    """The value, or `(a function)` for a callback such as oauth_cb."""
    return value if isinstance(value, ClientValue) else "(a function)"


def _set_by(name: str, overrides: Mapping[str, ClientValue]) -> Literal["you", "app", "kconsume", "promise"]:
    if name in overrides:
        return "you"
    if name in ("bootstrap.servers", "group.id"):
        return "app"
    return "promise" if name in FORBIDDEN else "kconsume"


def _why(name: str, default: Default | None, set_by: str, *, embedded: bool) -> str | None:
    if set_by == "promise":
        return FORBIDDEN[name]
    if set_by != "kconsume":
        return None
    if embedded and name in EMBEDDED_DEFAULTS:
        if name == "check.crcs":
            return "the embedded broker writes the markers of transactions without a checksum"
        return "the embedded broker ends a rebalance only when the session timeout is nearly over"
    return default and default.why


# The cluster


def _address(brokers: str) -> str | None:
    """The address of the brokers. None for an embedded broker that is not running: to connect would start it."""
    if not brokers.startswith(EMBEDDED):
        return brokers
    name = brokers.removeprefix(EMBEDDED)
    if not name:
        return None
    from kconsume._embedded.named_broker import find

    running = find(name)
    return None if running is None else running.bootstrap


def _ask_cluster(app: App, cluster: Cluster, embedded: bool) -> ClusterFacts:
    topics: dict[str, int | None] = {}
    missing: dict[str, str] = {}
    try:
        for topic in sorted({topic for registration in app.registrations for topic in registration.all_topics}):
            try:
                topics[topic] = cluster.topics([topic])[topic] or None
            except TopicNotFound as error:
                topics[topic], missing[topic] = None, str(error)
    except BrokerUnavailable as error:
        return ClusterFacts(unreachable=str(error))
    groups = {registration.group for registration in app.registrations if registration.partitions is None}
    return ClusterFacts(topics, missing=missing, makes_topics=embedded, assignors=_assignors(cluster, groups))


def _assignors(cluster: Cluster, groups: Iterable[str]) -> dict[str, str]:
    assignors: dict[str, str] = {}
    for name in sorted(groups):
        try:
            group = cluster.group(name)
        except KconsumeError:
            continue  # an embedded broker cannot describe a group, and a principal may lack the right
        if group is not None and group.members and group.is_classic and group.assignor:
            assignors[name] = group.assignor
    return assignors

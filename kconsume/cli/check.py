"""`kconsume check`: what would run, with what guarantee, and what is wrong with it.

Gathers facts and shows them with what `findings.py` makes of them. Consumes nothing and joins no group:
the only questions go to the cluster, about its topics, and to the stores, about themselves and the app's offsets.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Literal

import click
import msgspec
from confluent_kafka import Consumer, KafkaException

from kconsume.app import App
from kconsume.backends import OffsetStore, SqliteStore, TransactionalStore
from kconsume.cli import findings, findings_postgres, findings_redis, stored
from kconsume.cli.findings import EMBEDDED, Budgets, ClientFacts, ClusterFacts, Finding, Handler
from kconsume.cli.target import VARIABLE, app_argument, load
from kconsume.cluster import Cluster
from kconsume.console import guarantee, sending
from kconsume.decoding import text_of
from kconsume.errors import BrokerUnavailable, KconsumeError, TopicNotFound
from kconsume.protocols import protocol_of
from kconsume.registration import Registration
from kconsume.runtime.fitting import most_workers
from kconsume.runtime.plans import budget_for
from kconsume.settings import DEFAULTS, FORBIDDEN, MASK, ClientValue, Default, client_settings, masked, masked_address
from kconsume.settings import EMBEDDED as EMBEDDED_DEFAULTS

_PATIENCE = 4.0


class Property(msgspec.Struct):
    """One property of the Kafka client as it will be, with secrets covered."""

    name: str
    value: ClientValue
    set_by: Literal["you", "app", "kconsume", "promise"]
    """`you` by `kafka={...}`, the `app` by its other arguments, `kconsume` by its defaults, or a `promise`, which
    cannot be changed."""
    librdkafka: ClientValue | None = None
    """The client's own default, where kconsume's is another."""
    kconsume: ClientValue | None = None
    """kconsume's default, where yours is another."""
    why: str | None = None


class Sheet(msgspec.Struct):
    """All that `check` has to say; printed as it is with `--json`."""

    app: str
    brokers: str
    group: str
    ok: bool
    """Whether no finding is an error."""
    findings: list[Finding]
    handlers: list[Handler]
    topics: dict[str, int | None] | None
    """Partitions of each topic, None for one that is not there; None if no broker was asked or answered."""
    shutdown: float
    revoke: float | None
    """Seconds in which a partition that moves is given up; None if the client refuses its configuration."""
    protocol: str
    """By which the group agrees: eager, cooperative or consumer."""
    memory: int
    kafka: list[Property]


@click.command(short_help="What would run, with what guarantee, and what is wrong with it?")
@app_argument
@click.option("--offline", is_flag=True, help="Do not ask the brokers for their topics.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def check(context: click.Context, app: str | None, offline: bool, as_json: bool) -> None:
    """What would run, with what guarantee, and what is wrong with it?

    Shows each handler of APP with its guarantee, the topics, and the configuration of the Kafka client with the
    reason for each default that is not the client's own; then what contradicts itself or will hurt, with the
    fix, also offsets that are stored and cannot be read from. Nothing is consumed, and secrets are covered.

    \b
      kconsume check shop:app
      kconsume check shop:app --offline          in CI, where no broker is
      kconsume check shop:app --json | jq .findings

    Exit code 0 if there is no error among the findings, else 2.
    """
    sheet = examine(load(app), os.environ[VARIABLE], offline=offline)
    if as_json:
        click.echo(msgspec.json.encode(sheet))
    else:
        from kconsume.cli.sheet import show

        show(sheet)
    context.exit(0 if sheet.ok else 2)


def examine(app: App, name: str, *, offline: bool = False) -> Sheet:
    """Gather the facts about an app and judge them."""
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
        *findings_postgres.of_stores([registration.store for registration in app.registrations], offline=offline),
        *findings_redis.of_stores([registration.store for registration in app.registrations], offline=offline),
        *findings.of_environment(app.unknown_variables()),
    ]
    unusable = {finding.about for finding in found if finding.level == "error"}
    found += findings.of_offsets(rows.found, {s: why for s, why in rows.unread.items() if s not in unusable})
    found = findings.ordered([*findings.of_client(client), *found])
    return Sheet(
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
    binding, store, batching, rate = registration.binding, registration.store, registration.batching, registration.rate
    transaction = binding.transaction
    return Handler(
        name=registration.name,
        topics=registration.topics,
        group=registration.group,
        store=masked_address(registration.store_address),
        gets=binding.payload,
        transaction=None if transaction is None else f"{transaction.__module__}.{transaction.__qualname__}",
        transactional_store=isinstance(store, TransactionalStore),
        guarantee=_promise(registration),
        own_guarantee=registration.own_guarantee is not None,
        on_error=str(registration.policy),
        start=registration.start,
        order=registration.order,
        executor=registration.executor,
        concurrency=registration.concurrency,
        workers=most_workers(registration.plan(), store),
        chunk=registration.chunk,
        batch=None if batching is None else f"{batching.records} records, or what came in {batching.wait:g} s",
        rate=None if rate is None else f"{rate.records} records in {rate.per:g} s",
        timeout=registration.options.timeout,
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


def _promise(registration: Registration) -> str:
    promise = guarantee(registration)
    if registration.binding.transaction is None or registration.own_guarantee is not None:
        return promise
    return f"{promise}; what it does elsewhere (a call, a file) is at least once"


def _trouble(store: OffsetStore) -> str | None:
    return store.trouble() if isinstance(store, SqliteStore) else None


# The client


def _ask_client(settings: Mapping[str, ClientValue]) -> ClientFacts:
    """What the client says of its configuration. With no brokers in it, it connects to nobody."""
    heard = _Heard()
    ear = logging.Logger("kconsume.check")
    ear.addHandler(heard)
    alone = {name: value for name, value in settings.items() if name != "bootstrap.servers"}
    try:
        consumer = Consumer(alone, logger=ear)
    except KafkaException as error:
        return ClientFacts(_without_secrets(error.args[0].str(), settings))
    except (TypeError, ValueError) as error:
        return ClientFacts(_without_secrets(str(error), settings))
    consumer.poll(0)  # what it logs comes with a poll
    consumer.close()
    return ClientFacts(warnings=tuple(_without_secrets(warning, settings) for warning in heard.warnings))


class _Heard(logging.Handler):
    """Collects what the client says about configuration: `CONFWARN [rdkafka#consumer-1] [thrd:app]: …`."""

    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text.startswith("CONFWARN"):
            self.warnings.append(text.partition("]: ")[2])


def _without_secrets(text: str, settings: Mapping[str, ClientValue]) -> str:
    covered = masked(settings)
    for name, value in settings.items():
        if covered[name] == MASK and str(value):
            text = text.replace(str(value), MASK)
    return text


def _properties(
    settings: Mapping[str, ClientValue], overrides: Mapping[str, ClientValue], *, embedded: bool
) -> list[Property]:
    """Every property that the client is given: first the person's, then ours."""
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
    """A function, such as oauth_cb, is passed through like a value, but says nothing in print."""
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
    """Where the brokers are; None for embedded ones that do not run, which asking would start."""
    if not brokers.startswith(EMBEDDED):
        return brokers
    name = brokers.removeprefix(EMBEDDED)
    if not name:
        return None
    from kconsume.testing.broker import find

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
            continue  # an embedded broker cannot say, and not every user may ask
        if group is not None and group.members and group.is_classic and group.assignor:
            assignors[name] = group.assignor
    return assignors

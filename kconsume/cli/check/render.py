"""Prints the result of `kconsume check` on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kconsume.cli.check.command import CheckReport, Property
from kconsume.cli.check.findings import Finding, Handler

_MARKS = {"error": ("✗ error", "bold red"), "warning": ("! warning", "yellow"), "note": ("· note", "cyan")}


def show(report: CheckReport) -> None:
    """Print the report: the handlers, their topics, the limits, the client's properties, and last the findings."""
    console = Console(highlight=False)
    console.print(Text.assemble((report.app, "bold"), f"  group {report.group}  brokers {report.brokers}"))
    for handler in report.handlers:
        _section(console, handler.name, _handler(handler))
    _section(console, "topics", _topics(report.topics))
    _section(console, "budgets", _facts(_budgets(report)))
    _section(console, "Kafka client", _properties(report.kafka))
    _section(console, "findings", _findings(report.findings))
    console.print(_verdict(report))


def _section(console: Console, title: str, body: RenderableType) -> None:
    console.print()
    console.print(Text(title, "bold"))
    console.print(Padding(body, (0, 0, 0, 2)))


def _facts(rows: Iterable[tuple[str, str]]) -> Table:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    for name, value in rows:
        facts.add_row(name, Text(value))
    return facts


def _handler(handler: Handler) -> Table:
    chunk = "chunks of adaptive size" if handler.chunk is None else f"chunks of at most {handler.chunk} records"
    pieces = chunk if handler.batch is None else f"batches of {handler.batch}"
    partitions = "" if handler.partitions is None else f", partitions {', '.join(map(str, handler.partitions))} only"
    return _facts(
        [
            ("topics", _topics_of(handler) + partitions),
            ("gets", handler.gets + (f", and the transaction ({handler.transaction})" if handler.transaction else "")),
            *([("resources", ", ".join(handler.resources))] if handler.resources else []),
            ("offsets", f"{handler.store}, group {handler.group}"),
            ("guarantee", handler.guarantee),
            *([("sends", _sends(handler))] if handler.sends else []),
            ("on error", handler.on_error),
            ("starts at", f"{handler.start}, if no offset is stored"),
            ("runs on", f"{_workers(handler)}, in {handler.order} order, in {pieces}"),
            *([("rate", handler.rate)] if handler.rate else []),
            *([("timeout", _timeout(handler))] if handler.timeout else []),
        ]
    )


def _timeout(handler: Handler) -> str:
    what = "is cancelled" if handler.executor == "async" else "is abandoned; its thread runs until the call returns"
    return f"a call that takes longer than {handler.timeout:g} s fails and {what}"


def _sends(handler: Handler) -> str:
    where = "its return values to " + handler.to if handler.to else "through a Sender"
    return f"{where}, {handler.sending}"


def _workers(handler: Handler) -> str:
    most = handler.workers
    if handler.executor == "inline":
        return "the polling thread"
    if handler.executor == "async":
        return f"an event loop, {'one' if most == 1 else f'up to {most} partitions'} at a time"
    return "1 thread" if most == 1 else f"a thread for each partition, up to {most}"


def _topics(topics: dict[str, int | None] | None) -> RenderableType:
    if topics is None:
        return Text("not asked, or no answer", "dim")
    return _facts((name, "missing" if count is None else f"{count} partitions") for name, count in topics.items())


_REVOKE = "{:g} s to drain a revoked partition ({} group), half of this time for running handlers"


def _topics_of(handler: Handler) -> str:
    return ", ".join(handler.topics) if handler.pattern is None else f"all that match {handler.pattern}"


def _budgets(report: CheckReport) -> list[tuple[str, str]]:
    return [
        ("shutdown", f"{report.shutdown:g} s from the request to stop until the process has ended"),
        *([] if report.revoke is None else [("revoke", _REVOKE.format(report.revoke, report.protocol))]),
        ("memory", f"{report.memory / 1024 / 1024:g} MiB of records in flight"),
    ]


def _properties(properties: Sequence[Property]) -> Group:
    """The user's properties first, then kconsume's own defaults, then the rest."""
    yours = [p for p in properties if p.set_by == "you"]
    ours = [p for p in properties if p.set_by == "kconsume" and p.librdkafka is not None]
    promised = [p for p in properties if p.set_by == "promise"]
    others = [p for p in properties if p not in yours and p not in ours and p not in promised]
    return Group(
        *_titled("set by you", [(p, _instead(p)) for p in yours]),
        *_titled("defaults of kconsume that differ from those of librdkafka", [(p, _reason(p)) for p in ours]),
        *_titled("fixed, because a promise of kconsume depends on them", [(p, p.why or "") for p in promised]),
        *_titled("others", [(p, "") for p in others]),
    )


def _titled(title: str, rows: Sequence[tuple[Property, str]]) -> list[RenderableType]:
    table = Table.grid(padding=(0, 2))
    for each, remark in rows:
        table.add_row(Text(f"{each.name} = {_value(each.value)}"), Text(remark, "dim"))
    return [Text(title, "italic"), Padding(table, (0, 0, 0, 2))] if rows else []


def _instead(each: Property) -> str:
    return "" if each.kconsume is None else f"instead of kconsume's {_value(each.kconsume)}"


def _reason(each: Property) -> str:
    return f"instead of {_value(each.librdkafka)}: {each.why}"


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _findings(findings: Sequence[Finding]) -> RenderableType:
    if not findings:
        return Text("none", "dim")
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for finding in findings:
        mark, style = _MARKS[finding.level]
        table.add_row(Text(mark, style), Group(Text(finding.problem), Text(f"→ {finding.fix}", "dim")))
    return table


def _verdict(report: CheckReport) -> Text:
    counts = {level: sum(f.level == level for f in report.findings) for level in _MARKS}
    told = ", ".join(f"{n} {level}{'' if n == 1 else 's'}" for level, n in counts.items() if n) or "nothing to report"
    if report.ok:
        return Text.assemble("\n", ("Ready to run: ", "green"), told)
    return Text.assemble("\n", ("It cannot work: ", "bold red"), told)

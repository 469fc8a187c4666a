"""`feed`: the whole path of a record without a broker: decoding, handler, failure policy, and output.

Finds the handler, makes the records and lends the caller's transaction. `kconsume._runtime.dry_run` then calls the
handler as a run does. Nothing is consumed, committed or sent.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol, cast

from msgspec import structs

from kconsume._handlers.annotations import text_of
from kconsume._handlers.binding import Binding
from kconsume._handlers.registration import Registration
from kconsume._kafka.outgoing import Outgoing, OutgoingHeaders, encoded
from kconsume._runtime.dry_run import DryRun, DryRunResources, DryRunResult
from kconsume._runtime.processing.dry_run_tx import AsyncConnectionSource, ConnectionSource, rolled_back_connection
from kconsume.app import App
from kconsume.errors import ConfigurationError, StoreError
from kconsume.records import Headers
from kconsume.testing._caller_transaction import connection_source

_CREATE_TIME = 1
_ROLLBACK = "rollback"
"""For `tx=`: a transaction of the app's own store that is rolled back, as in `kconsume try`."""

FedOutcome = Literal["handled", "skipped", "dead_lettered", "failed"]


class Fakes(Protocol):
    """Ready resources, by the type that handlers ask for: for example the dict `{Client: FakeClient()}`."""

    def items(self) -> Iterable[tuple[object, object]]: ...


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Fed:
    """The result of `feed` for a record or a batch."""

    outcome: FedOutcome
    """`"handled"`; `"skipped"` if it failed and the handler has `on_error="skip"`; `"dead_lettered"` if it failed and
    the handler has a `DeadLetter`; `"failed"` if it failed and would stop the app or hold its partition."""
    error: BaseException | None = None
    """What the handler raised, or a `DecodeError`. For a batch, the error of its first bad record."""
    sent: list[Outgoing] = dataclasses.field(default_factory=list)
    """What would be sent, in order, as bytes. A failed record sends nothing."""
    dead_letters: list[Outgoing] = dataclasses.field(default_factory=list)
    """The dead letters that would be written to a topic or a table, with their `kconsume-` headers."""

    def __repr__(self) -> str:
        parts = [repr(self.outcome)]
        if self.error is not None:
            parts.append(f"error={self.error!r}{_source_line(self.error)}")
        parts += [f"{name}={kept!r}" for name in ("sent", "dead_letters") if (kept := getattr(self, name))]
        return f"Fed({', '.join(parts)})"


def feed(
    app: App,
    topic: str,
    value: object,
    *,
    key: bytes | str | None = None,
    headers: OutgoingHeaders = (),
    tx: object = None,
    resources: Fakes | None = None,
    group: str | None = None,
) -> Fed:
    """Pass a record to the app's handler of this topic, without a broker, and return the outcome.

    A handler that fails is an outcome: `feed` does not raise its error. An `async def` gets an event loop of its own.

    Args:
        app: the app whose handler is called.
        topic: the topic of the record. The handler of this topic is called.
        value: the value of the record. Bytes stay as they are, None is a tombstone, any other value is encoded as if it
            were sent. For a handler of batches, a list is a batch. An item may be an `Outgoing` with a key and headers
            of its own.
        key: the key of the record.
        headers: the headers of the record: a dict, or a list of pairs.
        tx: an open connection, for a handler that takes the store's transaction. It is never committed. With
            `"rollback"` the handler gets a transaction of the app's own store, which is rolled back at the end. The
            store must be running.
        resources: ready objects by type, such as `{Client: FakeClient()}`, in place of those that the app declares.
        group: the group of the handler, if several groups handle the topic.
    """
    handler = _handler(app, topic, group)
    if handler.binding.is_async and _in_a_loop():
        raise ConfigurationError(
            f"{handler.name} is async, and feed() was called inside an event loop that runs: write await afeed(...)"
        )
    messages = _messages(app, handler, topic, value, Outgoing(None, key, headers))
    with _store_of(handler, tx):
        return _fed(_dry_run(app, handler, messages, tx, resources).run(messages))


async def afeed(
    app: App,
    topic: str,
    value: object,
    *,
    key: bytes | str | None = None,
    headers: OutgoingHeaders = (),
    tx: object = None,
    resources: Fakes | None = None,
    group: str | None = None,
) -> Fed:
    """Do what `feed` does, in async code. An `async def` runs on the caller's event loop, a plain function blocks it.

    Args:
        app: the app whose handler is called.
        topic: the topic of the record. The handler of this topic is called.
        value: the value of the record. Bytes stay as they are, None is a tombstone, any other value is encoded as if it
            were sent. For a handler of batches, a list is a batch. An item may be an `Outgoing` with a key and headers
            of its own.
        key: the key of the record.
        headers: the headers of the record: a dict, or a list of pairs.
        tx: an open connection, for a handler that takes the store's transaction. It is never committed. With
            `"rollback"` the handler gets a transaction of the app's own store, which is rolled back at the end. The
            store must be running.
        resources: ready objects by type, such as `{Client: FakeClient()}`, in place of those that the app declares.
        group: the group of the handler, if several groups handle the topic.
    """
    handler = _handler(app, topic, group)
    messages = _messages(app, handler, topic, value, Outgoing(None, key, headers))
    with _store_of(handler, tx):
        return _fed(await _dry_run(app, handler, messages, tx, resources).run_on_loop(messages))


def _is_rollback(tx: object) -> bool:
    return isinstance(tx, str) and tx == _ROLLBACK  # == on a connection may have side effects


@contextmanager
def _store_of(handler: Registration, tx: object) -> Iterator[None]:
    """With `tx="rollback"`, close the store that the call opened. Raises if the store does not answer."""
    if not _is_rollback(tx):
        yield
        return
    try:
        yield
    except StoreError as error:
        raise ConfigurationError(
            f"{handler.name} takes the transaction of its store, and with tx={_ROLLBACK!r} the store could not begin "
            f"one ({error}): start that store, or give it a connection of your own, feed(..., tx=connection)"
        ) from error
    finally:
        handler.store.close()


def _fed(tried: DryRunResult) -> Fed:
    passed: FedOutcome = "dead_lettered" if tried.dead_letters else "skipped" if tried.skipped else "handled"
    return Fed("failed" if tried.failed else passed, tried.error, tried.sent, tried.dead_letters)


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _source_line(error: BaseException) -> str:
    """Return where the error was raised, for the message of a failed assertion."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    path, here = Path(frames[-1].filename), Path.cwd()
    return f" at {path.relative_to(here) if path.is_relative_to(here) else path}:{frames[-1].lineno}"


# The handler and the records


def _handler(app: App, topic: str, group: str | None) -> Registration:
    handlers = [r for r in app.registrations if r.wanted.takes(topic)]
    if not handlers:
        handled = ", ".join(sorted({r.topics_text for r in app.registrations})) or "none at all"
        raise ConfigurationError(
            f"the app has no handler for topic {topic!r}: it handles {handled}; feed one of these topics"
        )
    chosen = [r for r in handlers if group in (None, r.group)]
    if len(chosen) == 1:
        return chosen[0]
    which = " or ".join(f"group={r.group!r} ({r.name})" for r in handlers)
    if chosen:
        raise ConfigurationError(f"topic {topic!r} has {len(chosen)} handlers: name one of them with {which}")
    raise ConfigurationError(f"topic {topic!r} has no handler in group {group!r}: choose {which}")


def _messages(app: App, handler: Registration, topic: str, value: object, common: Outgoing) -> list[FedMessage]:
    """Return the records to pass to the handler. `common` has the key and headers of values that are no `Outgoing`."""
    values = value if isinstance(value, list) and handler.binding.batched else [value]
    if not values:
        raise ConfigurationError(f"{handler.name} never gets an empty batch: feed a list with one value or more")
    millis = int(time.time() * 1000)
    made = []
    for offset, each in enumerate(values):
        whole = each if isinstance(each, Outgoing) else structs.replace(common, value=each)
        if whole.topic not in (None, topic):
            raise ConfigurationError(
                f"an item of the batch has topic={whole.topic!r}, but feed() was called for topic {topic!r}: remove "
                f"topic= from the item"
            )
        made.append(FedMessage(encoded(whole, topic, app.declared.max_message_bytes), topic, offset, millis))
    return made


def _dry_run(
    app: App, handler: Registration, messages: Sequence[FedMessage], tx: object, resources: Fakes | None
) -> DryRun:
    # If no value can be decoded, the handler is not called, and the result is a decode error, as in a run.
    if tx is not None or any(map(handler.binding.can_decode, messages)):
        _check_transaction(handler.binding, tx)
    dry_run_resources = DryRunResources(
        app.declared.resources, {**app.declared.ready_resources, **checked_resources(app, resources)}, app.shutdown
    )
    connection: ConnectionSource | AsyncConnectionSource | None = None
    if _is_rollback(tx):
        connection = rolled_back_connection(handler.store, handler.binding)
    elif tx is not None:
        connection = connection_source(tx)
    scope = f"{handler.group}:{messages[0].topic()}"
    return DryRun(handler.plan(), scope, dry_run_resources, connection, app.declared.max_message_bytes)


def checked_resources(app: App, resources: Fakes | None) -> dict[object, object]:
    """Return the resources as a dict. Raises ConfigurationError for a type that the app does not declare.

    Args:
        app: the app whose resources are replaced.
        resources: ready objects by type, or None.
    """
    given = dict(resources.items()) if resources is not None else {}
    for hint in given:
        if hint not in app.declared.resources:
            declared = ", ".join(map(text_of, app.declared.resources)) or "none"
            raise ConfigurationError(
                f"resources= has {text_of(hint)}, which no handler can ask for, because no @app.resource provides it: "
                f"the app has {declared}; give one of these types"
            )
    return given


def _check_transaction(binding: Binding, tx: object) -> None:
    wanted, name = binding.transaction, binding.name
    if wanted is None and tx is not None:
        raise ConfigurationError(f"{name} takes no transaction, so tx= would do nothing: leave it out")
    if wanted is None or _is_rollback(tx) or isinstance(tx, wanted):
        return
    if tx is None:
        raise ConfigurationError(
            f"{name} takes the transaction of its store, and there is no store here: give it a connection of your own, "
            f"feed(..., tx=connection), where connection is a {text_of(wanted)}"
        )
    raise ConfigurationError(
        f"{name} takes a {text_of(wanted)}, and tx= is a {type(tx).__name__}: give a {text_of(wanted)}"
    )


class FedMessage:
    """A record that was never in Kafka, with the methods of the client's message.

    Args:
        outgoing: its key, value and headers, encoded.
        topic: its topic. The partition is 0.
        offset: its offset.
        millis: its timestamp in milliseconds since 1970.
    """

    __slots__ = ("_headers", "_key", "_millis", "_offset", "_topic", "_value")

    def __init__(self, outgoing: Outgoing, topic: str, offset: int, millis: int) -> None:
        self._topic = topic
        self._offset = offset
        self._millis = millis
        self._key = cast("bytes | None", outgoing.key)
        self._value = cast("bytes | None", outgoing.value)
        self._headers = cast(Headers, outgoing.headers)

    def topic(self) -> str:
        return self._topic

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset

    def key(self) -> bytes | None:
        return self._key

    def value(self) -> bytes | None:
        return self._value

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        return list(self._headers) or None

    def timestamp(self) -> tuple[int, int]:
        return _CREATE_TIME, self._millis

    def leader_epoch(self) -> int | None:
        return None

    def __len__(self) -> int:
        return len(self._value or b"")

    def __repr__(self) -> str:
        return f"FedMessage({self._topic}/0@{self._offset})"

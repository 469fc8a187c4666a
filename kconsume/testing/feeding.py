"""`feed`: the whole path of a record with no broker. Decode, handler, failure policy, and what is sent.

Finds the handler, makes the records, lends the caller's transaction; the call itself is `kconsume.trial`'s, which is
made of the parts of a run. Nothing is consumed, committed or sent.
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

from kconsume.app import App
from kconsume.decoding import text_of
from kconsume.errors import ConfigurationError, StoreError
from kconsume.handler import Binding
from kconsume.output import Outgoing, OutgoingHeaders, encoded
from kconsume.records import Headers
from kconsume.registration import Registration
from kconsume.testing.borrowing import borrow
from kconsume.trial import AsyncLend, Furniture, Lend, Trial, Tried, rehearsal

_CREATE_TIME = 1
_ROLLBACK = "rollback"
"""As `tx=`: a transaction of the app's own store, as `kconsume try` gives it. Nothing of it stays."""

FedOutcome = Literal["handled", "skipped", "dead_lettered", "failed"]


class Fakes(Protocol):
    """Ready resources by the type that handlers ask for: a dict, `{Client: FakeClient()}`."""

    def items(self) -> Iterable[tuple[object, object]]: ...


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Fed:
    """What became of a record, or of a batch."""

    outcome: FedOutcome
    """`"handled"`; `"skipped"`, if it failed and `on_error="skip"`; `"dead_lettered"`, if it failed and has a
    `DeadLetter`; `"failed"`, if it failed and would stop the app, or hold its partition."""
    error: BaseException | None = None
    """What the handler raised, or a `DecodeError`; of a batch, what its first bad record did."""
    sent: list[Outgoing] = dataclasses.field(default_factory=list)
    """What would be sent, in order, as bytes; nothing of a record that did not pass."""
    dead_letters: list[Outgoing] = dataclasses.field(default_factory=list)
    """The dead letters that would be written, to a topic or a table, with their `kconsume-` headers."""

    def __repr__(self) -> str:
        parts = [repr(self.outcome)]
        if self.error is not None:
            parts.append(f"error={self.error!r}{_place(self.error)}")
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
    """Hand a record to the app's handler of this topic, and say what became of it.

    `value`: bytes as they are, None for a tombstone, anything else encoded as if it were sent. For a handler of
    batches, a list is a batch; one of its items may be an `Outgoing`, with a key and headers of its own. `tx`: an open
    connection, for a handler that takes the store's transaction; it is never committed. With `"rollback"` it is one of
    the app's own store, which must be there, undone at the end. `resources`: by type, in the place of those that the
    app declares. `group`: which handler, where the topic has several in different groups.

    A handler that fails is an outcome, and not an error here. An `async def` gets an event loop of its own.
    """
    handler = _handler(app, topic, group)
    if handler.binding.is_async and _in_a_loop():
        raise ConfigurationError(
            f"{handler.name} is async, and feed() was called inside an event loop that runs: write await afeed(...)"
        )
    messages = _messages(app, handler, topic, value, Outgoing(None, key, headers))
    with _store_of(handler, tx):
        return _fed(_trial(app, handler, messages, tx, resources).run(messages))


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
    """`feed` for async code: an `async def` runs on the caller's loop, a plain function blocks it."""
    handler = _handler(app, topic, group)
    messages = _messages(app, handler, topic, value, Outgoing(None, key, headers))
    with _store_of(handler, tx):
        return _fed(await _trial(app, handler, messages, tx, resources).run_on_loop(messages))


def _is_rollback(tx: object) -> bool:
    return isinstance(tx, str) and tx == _ROLLBACK  # what a connection does when it is compared is not ours to know


@contextmanager
def _store_of(handler: Registration, tx: object) -> Iterator[None]:
    """Of `tx="rollback"`: opened by the call, and closed again. A store that is not there is no outcome."""
    if not _is_rollback(tx):
        yield
        return
    try:
        yield
    except StoreError as error:
        raise ConfigurationError(
            f"{handler.name} takes the transaction of its store, and tx={_ROLLBACK!r} found none ({error}): start that "
            f"store, or give it a connection of your own, feed(..., tx=connection)"
        ) from error
    finally:
        handler.store.close()


def _fed(tried: Tried) -> Fed:
    passed: FedOutcome = "dead_lettered" if tried.dead else "skipped" if tried.skipped else "handled"
    return Fed("failed" if tried.failed else passed, tried.error, tried.sent, tried.dead)


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _place(error: BaseException) -> str:
    """Where it was raised, for whoever reads a failed assertion."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    path, here = Path(frames[-1].filename), Path.cwd()
    return f" at {path.relative_to(here) if path.is_relative_to(here) else path}:{frames[-1].lineno}"


# What is fed, and to whom


def _handler(app: App, topic: str, group: str | None) -> Registration:
    handlers = [r for r in app.registrations if r.wanted.takes(topic)]
    if not handlers:
        handled = ", ".join(sorted({r.topics_text for r in app.registrations})) or "none at all"
        raise ConfigurationError(f"the app has no handler for topic {topic!r}: it handles {handled}")
    chosen = [r for r in handlers if group in (None, r.group)]
    if len(chosen) == 1:
        return chosen[0]
    which = " or ".join(f"group={r.group!r} ({r.name})" for r in handlers)
    if chosen:
        raise ConfigurationError(f"topic {topic!r} has {len(chosen)} handlers: say which, with {which}")
    raise ConfigurationError(f"topic {topic!r} has no handler in group {group!r}: choose {which}")


def _messages(app: App, handler: Registration, topic: str, value: object, common: Outgoing) -> list[FedMessage]:
    """`common` has the key and the headers of all that have none of their own."""
    values = value if isinstance(value, list) and handler.binding.batched else [value]
    if not values:
        raise ConfigurationError(f"{handler.name} never gets an empty batch: feed a list with something in it")
    millis = int(time.time() * 1000)
    made = []
    for offset, each in enumerate(values):
        whole = each if isinstance(each, Outgoing) else structs.replace(common, value=each)
        if whole.topic not in (None, topic):
            raise ConfigurationError(
                f"an item of the batch is for topic {whole.topic!r}, and {topic!r} is fed: leave its topic= out"
            )
        made.append(FedMessage(encoded(whole, topic, app._most_bytes), topic, offset, millis))
    return made


def _trial(
    app: App, handler: Registration, messages: Sequence[FedMessage], tx: object, resources: Fakes | None
) -> Trial:
    # Where nothing can be decoded the handler is not called, so what is wrong is the payload, as in a run.
    if tx is not None or any(map(handler.binding.can_decode, messages)):
        _check_transaction(handler.binding, tx)
    furniture = Furniture(app._resources, {**app._given, **known(app, resources)}, app.shutdown)
    lend: Lend | AsyncLend | None = None
    if _is_rollback(tx):
        lend = rehearsal(handler.store, handler.binding)
    elif tx is not None:
        lend = borrow(tx)
    scope = f"{handler.group}:{messages[0].topic()}"
    return Trial(handler.plan(), scope, furniture, lend, app._most_bytes)


def known(app: App, resources: Fakes | None) -> dict[object, object]:
    """The resources as a dict; refused if the app knows no such type, because nobody would ever get it."""
    given = dict(resources.items()) if resources is not None else {}
    for hint in given:
        if hint not in app._resources:
            declared = ", ".join(map(text_of, app._resources)) or "none"
            raise ConfigurationError(
                f"resources= has {text_of(hint)}, which no handler can ask for, because no @app.resource provides it: "
                f"the app has {declared}"
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
    raise ConfigurationError(f"{name} takes a {text_of(wanted)}, and tx= is a {type(tx).__name__}: give it the former")


class FedMessage:
    """A record that came from nowhere, as a runner reads it."""

    __slots__ = ("_headers", "_key", "_millis", "_offset", "_topic", "_value")

    def __init__(self, outgoing: Outgoing, topic: str, offset: int, millis: int) -> None:
        """`outgoing` is encoded."""
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

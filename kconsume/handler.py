"""From a signature to one specialised call.

What a handler asks for is matched with what there is, when it is decorated; what nobody provides is refused there.
What comes out is a `Binding`. Its `runner` is compiled for exactly this function: a record costs one loop turn, one
decode and one call, and nothing for what the handler does not ask for. Nothing here knows threads or stores.
"""

from __future__ import annotations

import dataclasses
import sqlite3
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from operator import length_hint
from typing import NamedTuple, Protocol

from kconsume import logs
from kconsume.batches import Batch
from kconsume.decoding import Decoding, explain_decode, text_of, without_none
from kconsume.errors import DecodeError, InvalidHandler
from kconsume.output import Outgoing, Sender, returned
from kconsume.records import Message, Record, record_of
from kconsume.signature import Form, Returns, Signature, Wish, read
from kconsume.wrapping import Wrap, wrapped

MOST_BYTES = 1_000_000
"""What the client sends at most in one message, by default."""

_KNOWN_TRANSACTIONS: dict[object, str] = {sqlite3.Connection: "sqlite:///file.db"}


class Halt(NamedTuple):
    """Where a runner ended early: on an error, or, with none, before a record because it was told to stop."""

    message: Message
    error: BaseException | None
    certain: bool = True
    """Whether it is this record that failed. A batch fails as a whole, and its first record stands for it."""


class Runner(Protocol):
    """Calls the handler for each message in order, until the end, an error, or `stop` is no longer empty. What it
    sends is appended to `sent`, but for that of a record that failed."""

    def __call__(
        self, messages: Sequence[Message], stop: Sequence[object], tx: object, scope: str, sent: list[Outgoing], /
    ) -> Halt | None: ...


class AsyncRunner(Protocol):
    """The same for an `async def` handler."""

    def __call__(
        self, messages: Sequence[Message], stop: Sequence[object], tx: object, scope: str, sent: list[Outgoing], /
    ) -> Awaitable[Halt | None]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """What a handler can get beside its payload."""

    transactions: Sequence[type] = ()
    """The types of the store's transaction."""
    store: str = "kafka://"
    """The store's address, for words."""
    resources: Mapping[object, str] = dataclasses.field(default_factory=dict)
    """The types that resources provide, with their names."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """A handler, and where each of its arguments comes from."""

    signature: Signature
    arguments: tuple[str, ...]
    transaction: type | None
    """The annotation by which the handler asked for the store's transaction."""
    resources: Mapping[str, object]
    """The types of the resources it asks for, by parameter."""
    takes_sender: bool
    to: str | None

    @property
    def function(self) -> Callable[..., object]:
        return self.signature.function

    @property
    def name(self) -> str:
        return self.signature.name

    @property
    def payload(self) -> str:
        return self.signature.payload

    @property
    def batched(self) -> bool:
        return self.signature.form.batched

    @property
    def is_async(self) -> bool:
        return self.signature.is_async

    @property
    def sends(self) -> bool:
        return self.takes_sender or self.to is not None

    def runner(
        self, resources: Mapping[object, object] | None = None, wraps: Sequence[Wrap] = (), most: int = MOST_BYTES
    ) -> Runner:
        """For a plain function. `resources` by type; `wraps` from the outermost on; `most`: bytes of a message."""
        assert not self.is_async
        return typing.cast(Runner, _compile(self, resources or {}, wraps, most))

    def async_runner(
        self, resources: Mapping[object, object] | None = None, wraps: Sequence[Wrap] = (), most: int = MOST_BYTES
    ) -> AsyncRunner:
        assert self.is_async
        return typing.cast(AsyncRunner, _compile(self, resources or {}, wraps, most))

    def explain(self, message: Message, error: BaseException) -> BaseException:
        """What really went wrong: the decoder's fault becomes a `DecodeError`, the handler's stays as it is.

        Our decoders are pure, so asking again tells the two apart, and the happy path pays nothing for it. A person's
        own may not be: what it raises is a `DecodeError` already.
        """
        decoding = self.signature.decoding
        if decoding is None:
            return error
        value = message.value()
        if value is None:
            return error if decoding.optional else _null(self)
        if decoding.call is None or not decoding.pure:
            return error
        try:
            decoding.call(value)
        except Exception as cause:  # noqa: BLE001  (whatever a decoder raises)
            fault = DecodeError(f"the value is not {decoding.text}: {explain_decode(cause)}")
            fault.__cause__ = cause
            return fault
        return error


def bind(
    handler: Callable[..., object] | Signature,
    offer: Offer | Sequence[type] = (),
    *,
    names: Mapping[str, object] | None = None,
    to: str | None = None,
) -> Binding:
    """Match what the handler asks for with what is offered: the store's transactions, or all that there is."""
    signature = handler if isinstance(handler, Signature) else read(handler, names)
    offer = offer if isinstance(offer, Offer) else Offer(offer)
    if signature.returns is Returns.SOMETHING and to is None:
        raise InvalidHandler(
            f"{signature.name} returns a value, and nothing takes it: name the topic that it goes to, as in "
            f"@app.consume(..., to='shipped'), or annotate it -> None"
        )
    arguments = [_FIRST[signature.form]]
    transaction: type | None = None
    resources: dict[str, object] = {}
    takes_sender = by_name = False
    for wish in signature.wishes:
        by_name = by_name or wish.kind is wish.kind.KEYWORD_ONLY
        hint = without_none(wish.hint)[0]
        expression = _metadata(signature, wish)
        if expression is not None:
            pass
        elif any(hint is offered for offered in offer.transactions):
            transaction, expression = typing.cast(type, hint), "tx"
            _must_have_one_provider(signature.name, wish, offer)
        elif hint is Sender:
            takes_sender, expression = True, "sender"
        elif _is_resource(hint, offer):
            expression = f"resource_{wish.name}"
            resources[wish.name] = hint
        elif wish.has_default:
            by_name = True  # what follows would move up into its place
            continue
        else:
            raise _unprovided(signature.name, wish, offer)
        if by_name and wish.kind is wish.kind.POSITIONAL_ONLY:
            raise InvalidHandler(
                f"{signature.name} takes {wish.name} by position only, after a parameter that keeps its default: "
                f"put {wish.name} before it, or remove the /"
            )
        arguments.append(f"{wish.name}={expression}" if by_name else expression)
    return Binding(signature, tuple(arguments), transaction, resources, takes_sender, to)


_FIRST = {
    Form.ONE: "payload",
    Form.LIST: "payload",
    Form.TABLE: "table",
    Form.BATCH: "batch",
}


def _metadata(signature: Signature, wish: Wish) -> str | None:
    """`Record` or `Batch`, whichever goes with how the handler is called."""
    if wish.hint is Record and not signature.form.batched:
        return "record"
    if wish.hint is Batch and signature.form.batched:
        return "batch"
    if wish.hint is Record:
        raise InvalidHandler(
            f"{signature.name} gets {signature.payload} and asks for {wish.name}: Record: a batch has many; ask for "
            f"{wish.name}: Batch"
        )
    if wish.hint is Batch:
        raise InvalidHandler(
            f"{signature.name} gets one record at a time and asks for {wish.name}: Batch: ask for {wish.name}: Record, "
            f"or annotate the payload as list[...]"
        )
    return None


# What there is


def _is_resource(hint: object, offer: Offer) -> bool:
    try:
        return hint in offer.resources
    except TypeError:  # an annotation that cannot be hashed
        return False


def _must_have_one_provider(name: str, wish: Wish, offer: Offer) -> None:
    if _is_resource(wish.hint, offer):
        raise InvalidHandler(
            f"{name} asks for {wish.name}: {text_of(wish.hint)}, which both the store {offer.store} (its transaction) "
            f"and the resource {offer.resources[wish.hint]} provide: let the resource provide a type of its own"
        )


def _unprovided(name: str, wish: Wish, offer: Offer) -> InvalidHandler:
    parameter, hint = wish.name, wish.hint
    if hint is None:
        return InvalidHandler(
            f"{name} does not say what {parameter!r} is: annotate it with Record, or with the transaction "
            f"of the offset store"
        )
    for known, address in _KNOWN_TRANSACTIONS.items():
        if hint is known:
            return InvalidHandler(
                f"{name} asks for {parameter}: {text_of(hint)}, but its offsets are in {offer.store}, which has no "
                f"such transaction: use offsets={address!r}"
            )
    offered = ", ".join(["Record", "Sender", *map(text_of, offer.transactions), *map(text_of, offer.resources)])
    return InvalidHandler(
        f"{name} asks for {parameter}: {text_of(hint)}, which nobody provides with offsets in {offer.store}: "
        f"it can get {offered}; or give the parameter a default, or declare above it an @app.resource that yields it"
    )


def _null(binding: Binding) -> DecodeError:
    wanted = binding.payload
    instead = f"{wanted[:-1]} | None]" if binding.batched else f"{wanted} | None"
    return DecodeError(
        f"the value is null (a tombstone), and {binding.name} takes {wanted}: annotate it as {instead} to get "
        f"tombstones as None"
    )


# The runner


class _NullValue(ValueError):
    """Raised by a runner, turned into a `DecodeError` with words by `Binding.explain`."""


def _raise_null() -> typing.NoReturn:
    raise _NullValue


# Where the handler asks for the value alone, the message itself is not touched by Python code at all.
_RECORDS = """\
{define} run(messages, stop, tx, scope, sent):
    if not messages:
        return None
    turn = iter(messages)
    {prepare}token = enter(messages, turn)
    try:
        for {each}:
            if stop:
                return Halt(messages[-1 - length_hint(turn)], None)
            {before}{call}
    except BaseException as error:
        {undo}return Halt(messages[-1 - length_hint(turn)], error)
    finally:
        {close}leave(token)
    return None
"""

_BATCH = """\
{define} run(messages, stop, tx, scope, sent):
    if not messages:
        return None
    if stop:
        return Halt(messages[0], None)
    turn = iter(messages)
    {prepare}token = enter(messages, None)
    try:
        {payload}
    except BaseException as error:
        leave(token)
        return Halt(messages[-1 - length_hint(turn)], error)
    try:
        {before}{call}
    except BaseException as error:
        {undo}return Halt(messages[0], error, len(messages) == 1)
    finally:
        {close}leave(token)
    return None
"""


def _compile(
    binding: Binding, resources: Mapping[object, object], wraps: Sequence[Wrap], most: int
) -> Callable[..., object]:
    """One function a handler, made of text as dataclasses makes `__init__`: a closure for each argument
    would cost a call a record, more than the rest of the loop."""
    signature = binding.signature
    function = wrapped(signature, wraps) if wraps else signature.function
    template, parts = _parts(binding, bool(wraps))
    source = template.format(**parts)
    scope: dict[str, object] = {
        "length_hint": length_hint,
        "enter": logs.enter,
        "leave": logs.leave,
        "Halt": Halt,
        "Batch": Batch,
        "Sender": Sender,
        "NullValue": _NullValue,
        "null": _raise_null,
        "record_of": record_of,
        "returned": returned,
        "unexpected": _unexpected(signature.name),
        "function": function,
        "decode": None if signature.decoding is None else signature.decoding.call,
        "to": binding.to,
        "most": most,
        **{f"resource_{parameter}": resources[hint] for parameter, hint in binding.resources.items()},
    }
    if signature.form is Form.TABLE:
        from kconsume.tables import table_of

        scope["table_of"] = table_of
    exec(compile(source, f"<kconsume runner of {signature.function!r}>", "exec"), scope)
    return typing.cast(Callable[..., object], scope["run"])


def _parts(binding: Binding, wrapped: bool) -> tuple[str, dict[str, str]]:
    signature = binding.signature
    arguments = [_spelled(argument, signature) for argument in binding.arguments]
    if wrapped:
        arguments.insert(0, "Batch(messages, scope)" if binding.batched else "record_of(message, scope)")
    await_ = "await " if binding.is_async else ""
    call = f"{await_}function({', '.join(arguments)})"
    if binding.to is not None:
        call = f"sent.extend(returned({call}, to, most))"
    elif signature.returns is Returns.UNKNOWN:
        call = f"if (result := {call}) is not None: raise unexpected(result)"
    parts = {
        "define": "async def" if binding.is_async else "def",
        "prepare": "sender = Sender(sent, most); mark = len(sent)\n    " if binding.sends else "",
        "undo": "del sent[mark:]\n        " if binding.sends else "",
        "close": "sender.close(); " if binding.sends else "",
        "before": "",
        "call": call,
    }
    if binding.batched:
        return _BATCH, {**parts, "payload": _batch_payload(signature)}
    of_message = any("message" in argument for argument in arguments)
    before = "mark = len(sent)\n            " if binding.sends else ""
    before += "value = message.value()\n            " if of_message else ""
    before += _null_guard(signature)
    each = "message in turn" if of_message else "value in map(type(messages[0]).value, turn)"
    return _RECORDS, {**parts, "each": each, "before": before}


def _null_guard(signature: Signature) -> str:
    """Only where the decoder would not stumble over a null by itself."""
    decoding = signature.decoding
    if decoding is None or decoding.optional or (decoding.call is not None and decoding.pure):
        return ""
    return "if value is None: raise NullValue\n            "


def _spelled(argument: str, signature: Signature) -> str:
    """An argument as the template writes it."""
    name, equals, expression = argument.rpartition("=")
    if expression == "record":
        expression = "record_of(message, scope)"
    elif expression == "batch":
        expression = "Batch(messages, scope)"
    elif expression == "table":
        expression = "table_of(messages)"
    elif expression == "payload" and not signature.form.batched:
        expression = "record_of(message, scope)" if signature.decoding is None else _decoded(signature.decoding)
    return f"{name}{equals}{expression}"


def _decoded(decoding: Decoding) -> str:
    if decoding.call is None:
        return "value"
    decoded = "decode(message)" if decoding.of_message else "decode(value)"
    return f"None if value is None else {decoded}" if decoding.optional else decoded


def _batch_payload(signature: Signature) -> str:
    """The statements that make the first argument. An error in them is that of the record that `turn` stands at."""
    decoding = signature.decoding
    if signature.form in (Form.TABLE, Form.BATCH):
        return "pass"
    if decoding is None:
        return "payload = [record_of(message, scope) for message in turn]"
    if decoding.of_message:
        guard = "None" if decoding.optional else "null()"
        return f"payload = [{guard} if message.value() is None else decode(message) for message in turn]"
    if decoding.call is None and decoding.optional:
        return "payload = list(map(type(messages[0]).value, turn))"
    if decoding.call is None:
        return (
            "payload = list(map(type(messages[0]).value, turn))\n"
            "        if None in payload:\n"
            "            turn = iter(messages[payload.index(None) + 1:])\n"
            "            raise NullValue"
        )
    if decoding.optional or not decoding.pure:
        null = "None" if decoding.optional else "null()"
        return f"payload = [{null} if value is None else decode(value) for value in map(type(messages[0]).value, turn)]"
    return "payload = list(map(decode, map(type(messages[0]).value, turn)))"


def _unexpected(name: str) -> Callable[[object], InvalidHandler]:
    def unexpected(result: object) -> InvalidHandler:
        return InvalidHandler(
            f"{name} returned a value ({type(result).__name__}), and nothing takes it: name the topic that it goes to, "
            f"as in @app.consume(..., to='shipped'), or return nothing"
        )

    return unexpected

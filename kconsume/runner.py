"""One function for one handler, compiled from text: the loop over a slice of records, or the call with a batch.

As dataclasses makes `__init__`: a closure for each argument would cost a call a record, more than the rest of the loop.
So a record costs one loop turn, one decode and one call, and nothing for what its handler does not ask for. What the
handler asks for was decided by `handler.py`; what its outcome means is `runtime/course.py`'s.
"""

from __future__ import annotations

import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from operator import length_hint
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from kconsume import logs
from kconsume.batches import Batch
from kconsume.decoding import Decoding
from kconsume.errors import InvalidHandler
from kconsume.output import Outgoing, Sender, place_of, returned, stamp
from kconsume.records import Message, record_of
from kconsume.signature import Form, Returns, Signature
from kconsume.spark.sink import frame_of
from kconsume.wrapping import Wrap, wrapped

if TYPE_CHECKING:
    from kconsume.handler import Binding


Limit: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes of an `async def` one that ends in time."""


class Halt(NamedTuple):
    """Where a runner ended early: on an error, or, with none, before a record because it was told to stop."""

    message: Message
    error: BaseException | None
    certain: bool = True
    """Whether it is this record that failed. A batch fails as a whole, and its first record stands for it."""
    forsaken: bool = False
    """Whether the handler runs on, on a thread that nobody waits for."""
    void: bool = False
    """Whether the records before it are not done either: what they sent is lost."""


Passes = Callable[[Message, BaseException], bool]
"""Whether a record that has just failed is passed over, so that the runner goes on with the next."""


class Runner(Protocol):
    """Calls the handler for each message in order, until the end, an error that does not pass, or `stop` is no longer
    empty. What it sends is appended to `sent`, but for that of a record that failed."""

    def __call__(
        self,
        messages: Sequence[Message],
        stop: Sequence[object],
        tx: object,
        scope: str,
        sent: list[Outgoing],
        attempt: int = 1,
        passes: Passes | None = None,
        /,
    ) -> Halt | None: ...


class AsyncRunner(Protocol):
    """The same for an `async def` handler."""

    def __call__(
        self,
        messages: Sequence[Message],
        stop: Sequence[object],
        tx: object,
        scope: str,
        sent: list[Outgoing],
        attempt: int = 1,
        passes: Passes | None = None,
        /,
    ) -> Awaitable[Halt | None]: ...


class _NullValue(ValueError):
    """Raised by a runner, turned into a `DecodeError` with words by `Binding.explain`."""


def _raise_null() -> typing.NoReturn:
    raise _NullValue


# Where the handler asks for the value alone, the message itself is not touched by Python code at all.
# After a record that is passed over, the same iterators go on; to be able to costs those that do not fail nothing.
_RECORDS = """\
{define} run(messages, stop, tx, scope, sent, attempt=1, passes=None):
    if not messages:
        return None
    turn = iter(messages)
    {prepare}token = enter(messages, turn, attempt)
    try:
        {iterate}while True:
            try:
                for {each}:
                    if stop:
                        return Halt(messages[-1 - length_hint(turn)], None)
                    {before}{call}
                return None
            except BaseException as error:
                {undo}if passes is None or not passes(messages[-1 - length_hint(turn)], error):
                    return Halt(messages[-1 - length_hint(turn)], error)
    finally:
        {close}leave(token)
"""
_IN_LOOP, _IN_EXCEPT, _IN_BATCH = "\n" + " " * 20, "\n" + " " * 16, "\n" + " " * 8

_THE_RECORD, _THE_BATCH = "record_of(message, scope, attempt)", "Batch(messages, scope, attempt)"

_BATCH = """\
{define} run(messages, stop, tx, scope, sent, attempt=1, passes=None):
    if not messages:
        return None
    if stop:
        return Halt(messages[0], None)
    turn = iter(messages)
    {prepare}token = enter(messages, None, attempt)
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


def compile_runner(
    binding: Binding,
    resources: Mapping[object, object],
    wraps: Sequence[Wrap],
    most: int,
    by_record: bool = False,
    stamped: bool = False,
    limit: Limit | None = None,
) -> Callable[..., object]:
    """A `Runner`, or an `AsyncRunner` for an `async def`. `stamped`: what is sent says which record it came from."""
    signature = binding.signature
    function = wrapped(signature, wraps) if wraps else signature.function
    if limit is not None:
        function = limit(function)
    template, parts = _parts(binding, bool(wraps), by_record, stamped and binding.sends)
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
        "place_of": place_of,
        "stamp": stamp,
        "unexpected": _unexpected(signature.name),
        "function": function,
        "decode": None if signature.decoding is None else signature.decoding.call,
        "to": binding.to,
        "most": most,
        **{f"resource_{parameter}": resources[hint] for parameter, hint in binding.resources.items()},
    }
    if signature.form.tabular:
        from kconsume.tables import table_of

        scope["table_of"] = table_of
        scope["columns"] = None if signature.columns is None else signature.columns.table
        scope["frame_of"] = frame_of
    exec(compile(source, f"<kconsume runner of {signature.function!r}>", "exec"), scope)
    return typing.cast(Callable[..., object], scope["run"])


def _parts(binding: Binding, wrapped: bool, by_record: bool, stamped: bool) -> tuple[str, dict[str, str]]:
    signature = binding.signature
    arguments = [_spelled(argument, signature) for argument in binding.arguments]
    if wrapped:
        arguments.insert(0, _THE_BATCH if binding.batched else _THE_RECORD)
    await_ = "await " if binding.is_async else ""
    call = f"{await_}function({', '.join(arguments)})"
    if binding.to is not None:
        call = f"sent.extend(returned({call}, to, most))"
    elif signature.returns is Returns.UNKNOWN:
        call = f"if (result := {call}) is not None: raise unexpected(result)"
    parts = {
        "define": "async def" if binding.is_async else "def",
        "prepare": "sender = Sender(sent, most); mark = len(sent)\n    " if binding.sends else "",
        "undo": f"del sent[mark:]{_IN_BATCH if binding.batched else _IN_EXCEPT}" if binding.sends else "",
        "close": "sender.close(); " if binding.sends else "",
        "before": "",
        "call": call,
    }
    if stamped:
        indent, first = (_IN_BATCH, "messages[0]") if binding.batched else (_IN_LOOP, "message")
        parts["prepare"] += "place = place_of(scope, messages[0])\n    "
        parts["call"] += f"{indent}stamp(sent, mark, place, {first}.offset())"
    if binding.batched:
        return _BATCH, {**parts, "payload": _batch_payload(signature)}
    of_message = by_record or stamped or any("message" in argument for argument in arguments)
    # A sender for each record: one that was kept is refused, and its record's sends are not undone with another's.
    renewed = "sender.close(); sender = Sender(sent, most); " if binding.takes_sender else ""
    before = f"{renewed}mark = len(sent){_IN_LOOP}" if binding.sends else ""
    before += f"tx.next_record(message.offset()){_IN_LOOP}" if by_record else ""
    before += f"value = message.value(){_IN_LOOP}" if of_message else ""
    before += _null_guard(signature)
    if of_message:
        return _RECORDS, {**parts, "iterate": "", "each": "message in turn", "before": before}
    iterate = "values = map(type(messages[0]).value, turn)\n        "
    return _RECORDS, {**parts, "iterate": iterate, "each": "value in values", "before": before}


def _null_guard(signature: Signature) -> str:
    """Only where the decoder would not stumble over a null by itself."""
    decoding = signature.decoding
    if decoding is None or decoding.optional or (decoding.call is not None and decoding.pure):
        return ""
    return f"if value is None: raise NullValue{_IN_LOOP}"


def _spelled(argument: str, signature: Signature) -> str:
    """An argument as the template writes it."""
    name, equals, expression = argument.rpartition("=")
    if expression == "record":
        expression = _THE_RECORD
    elif expression == "batch":
        expression = _THE_BATCH
    elif expression == "table":
        expression = _tabulated(signature)
    elif expression == "frame":
        expression = f"frame_of(resource_{signature.first}, {_tabulated(signature)}, messages)"
    elif expression == "payload" and not signature.form.batched:
        expression = _THE_RECORD if signature.decoding is None else _decoded(signature.decoding)
    return f"{name}{equals}{expression}"


def _tabulated(signature: Signature) -> str:
    return "table_of(messages)" if signature.columns is None else "columns(payload)"


def _decoded(decoding: Decoding) -> str:
    if decoding.call is None:
        return "value"
    decoded = "decode(message)" if decoding.of_message else "decode(value)"
    return f"None if value is None else {decoded}" if decoding.optional else decoded


def _batch_payload(signature: Signature) -> str:
    """The statements that make the first argument. An error in them is that of the record that `turn` stands at."""
    decoding = signature.decoding
    if signature.form is Form.BATCH or (signature.form.tabular and decoding is None):
        return "pass"
    if decoding is None:
        return "payload = [record_of(message, scope, attempt) for message in turn]"
    if decoding.of_message:
        guard = "None" if decoding.optional else "null()"
        return f"payload = [{guard} if message.value() is None else decode(message) for message in turn]"
    if decoding.call is None and decoding.optional:
        return "payload = list(map(type(messages[0]).value, turn))"
    if decoding.call is None:
        return (
            "payload = list(map(type(messages[0]).value, turn))\n"
            "        if not all(payload) and None in payload:\n"
            "            turn = iter(messages[payload.index(None) + 1:])\n"
            "            raise NullValue"
        )
    if decoding.optional or not decoding.pure:
        null = "None" if decoding.optional else "null()"
        return f"payload = [{null} if value is None else decode(value) for value in map(type(messages[0]).value, turn)]"
    # A StopIteration in a decoder (a model's own validator may raise anything) ends `map` as if there were no more.
    return (
        "payload = list(map(decode, map(type(messages[0]).value, turn)))\n"
        "        if len(payload) != len(messages):\n"
        "            raise StopIteration"
    )


def _unexpected(name: str) -> Callable[[object], InvalidHandler]:
    def unexpected(result: object) -> InvalidHandler:
        return InvalidHandler(
            f"{name} returned a value ({type(result).__name__}), and nothing takes it: name the topic that it goes to, "
            f"as in @app.consume(..., to='shipped'), or return nothing"
        )

    return unexpected

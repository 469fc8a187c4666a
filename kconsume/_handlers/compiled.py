"""One function for one handler, compiled from text: the loop over a slice of records, or the call with a batch.

The function is compiled as dataclasses compiles `__init__`. A closure for each argument would cost one more call for
each record, which takes longer than the rest of the loop. A record costs one turn of the loop, one decode and one call.
Arguments that the handler does not ask for cost nothing. `binding` has decided what the arguments are. The chunk rules
(`_runtime/processing/rules.py`) decide what an error means.
"""

from __future__ import annotations

import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from operator import length_hint
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from kconsume import _log_context
from kconsume._handlers.batches import Batch
from kconsume._handlers.decoding import Decoding
from kconsume._handlers.signature import Form, Returns, Signature
from kconsume._handlers.wraps import Wrap, wrapped
from kconsume._kafka.outgoing import Outgoing, Sender, origin_prefix, returned, stamp
from kconsume.errors import InvalidHandler
from kconsume.records import Message, record_of

if TYPE_CHECKING:
    from kconsume._handlers.binding import Binding


Limit: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Takes an `async def`, and returns one whose calls end at the handler's `timeout=`."""


class Halt(NamedTuple):
    """The message at which a runner ended early: the record failed, or, with `error=None`, was not started."""

    message: Message
    error: BaseException | None
    certain: bool = True
    """True if `message` is the record that failed. A batch of several records fails as a whole: `message` is its first
    record."""
    abandoned: bool = False
    """True if the handler still runs on an abandoned thread."""
    sends_lost: bool = False
    """True if the records before `message` must be handled again too, because the records that they sent are lost."""


Passes = Callable[[Message, BaseException], bool]
"""Returns True if a record that has just failed is skipped, so that the runner continues with the next one."""


class Runner(Protocol):
    """Calls the handler for each message in order, or once with all of them.

    Returns None at the end. Returns a `Halt` at the first error for which `passes` does not return True, and as soon as
    `stop` is not empty.

    messages: records of one partition.
    stop: not empty when the runner must stop.
    tx: the store's transaction, for handlers that ask for it.
    scope: `group:topic_id`, the beginning of `Record.id`.
    sent: the records that the handler sends are appended. Records that were sent for a failed record are removed again.
    attempt: the number of this attempt on these records.
    passes: called for each failed record. Without it no failed record is skipped.
    """

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
    """A `Runner` for an `async def` handler."""

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
    """Raised by a runner at a null value. `Binding.explain` turns it into a `DecodeError`."""


def _raise_null() -> typing.NoReturn:
    raise _NullValue


# If the handler asks for the value alone, no Python code touches the message itself. After a record that was skipped,
# the same iterators continue, so records that do not fail cost nothing extra.
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
    max_bytes: int,
    by_record: bool = False,
    stamped: bool = False,
    limit: Limit | None = None,
) -> Callable[..., object]:
    """Return a `Runner`, or an `AsyncRunner` for an `async def`.

    Args:
        binding: where the arguments come from.
        resources: the resources, by type.
        wraps: the context managers around each call, the outermost first.
        max_bytes: the size of the largest message that the handler may send.
        by_record: True to call `tx.next_record(offset)` before each record.
        stamped: True to add the header `kconsume-origin` to each message that the handler sends.
        limit: wraps an `async def`, so that each call ends at the `timeout=`.
    """
    signature = binding.signature
    function = wrapped(signature, wraps) if wraps else signature.function
    if limit is not None:
        function = limit(function)
    template, parts = _parts(binding, bool(wraps), by_record, stamped and binding.sends)
    source = template.format(**parts)
    scope: dict[str, object] = {
        "length_hint": length_hint,
        "enter": _log_context.enter,
        "leave": _log_context.leave,
        "Halt": Halt,
        "Batch": Batch,
        "Sender": Sender,
        "NullValue": _NullValue,
        "null": _raise_null,
        "record_of": record_of,
        "returned": returned,
        "origin_prefix": origin_prefix,
        "stamp": stamp,
        "unexpected": _unexpected(signature.name),
        "function": function,
        "decode": None if signature.decoding is None else signature.decoding.call,
        "to": binding.to,
        "max_bytes": max_bytes,
        **{f"resource_{parameter}": resources[hint] for parameter, hint in binding.resources.items()},
    }
    if signature.form.tabular:
        from kconsume._handlers.arrow import table_of

        scope["table_of"] = table_of
        scope["columns"] = None if signature.columns is None else signature.columns.table
        scope["frame_of"] = None if signature.frame is None else signature.frame.make
    exec(compile(source, f"<kconsume runner of {signature.function!r}>", "exec"), scope)
    return typing.cast(Callable[..., object], scope["run"])


def _parts(binding: Binding, wrapped: bool, by_record: bool, stamped: bool) -> tuple[str, dict[str, str]]:
    signature = binding.signature
    arguments = [_argument_text(argument, signature) for argument in binding.arguments]
    if wrapped:
        arguments.insert(0, _THE_BATCH if binding.batched else _THE_RECORD)
    await_ = "await " if binding.is_async else ""
    call = f"{await_}function({', '.join(arguments)})"
    if binding.to is not None:
        call = f"sent.extend(returned({call}, to, max_bytes))"
    elif signature.returns is Returns.UNKNOWN:
        call = f"if (result := {call}) is not None: raise unexpected(result)"
    parts = {
        "define": "async def" if binding.is_async else "def",
        "prepare": "sender = Sender(sent, max_bytes); mark = len(sent)\n    " if binding.sends else "",
        "undo": f"del sent[mark:]{_IN_BATCH if binding.batched else _IN_EXCEPT}" if binding.sends else "",
        "close": "sender.close(); " if binding.sends else "",
        "before": "",
        "call": call,
    }
    if stamped:
        indent, first = (_IN_BATCH, "messages[0]") if binding.batched else (_IN_LOOP, "message")
        parts["prepare"] += "place = origin_prefix(scope, messages[0])\n    "
        parts["call"] += f"{indent}stamp(sent, mark, place, {first}.offset())"
    if binding.batched:
        return _BATCH, {**parts, "payload": _batch_payload_text(signature)}
    of_message = by_record or stamped or any("message" in argument for argument in arguments)
    # Each record gets a new Sender. A handler that keeps its Sender and uses it for a later record gets an error.
    # `mark` limits an undo to one record.
    renewed = "sender.close(); sender = Sender(sent, max_bytes); " if binding.takes_sender else ""
    before = f"{renewed}mark = len(sent){_IN_LOOP}" if binding.sends else ""
    before += f"tx.next_record(message.offset()){_IN_LOOP}" if by_record else ""
    before += f"value = message.value(){_IN_LOOP}" if of_message else ""
    before += _null_guard(signature)
    if of_message:
        return _RECORDS, {**parts, "iterate": "", "each": "message in turn", "before": before}
    iterate = "values = map(type(messages[0]).value, turn)\n        "
    return _RECORDS, {**parts, "iterate": iterate, "each": "value in values", "before": before}


def _null_guard(signature: Signature) -> str:
    """Return the source of the check for a null value; an empty text if the decoder fails on null anyway."""
    decoding = signature.decoding
    if decoding is None or decoding.optional or (decoding.call is not None and decoding.pure):
        return ""
    return f"if value is None: raise NullValue{_IN_LOOP}"


def _argument_text(argument: str, signature: Signature) -> str:
    name, equals, expression = argument.rpartition("=")
    if expression == "record":
        expression = _THE_RECORD
    elif expression == "batch":
        expression = _THE_BATCH
    elif expression == "table":
        expression = _table_text(signature)
    elif expression == "frame":
        expression = f"frame_of(resource_{signature.first}, {_table_text(signature)}, messages)"
    elif expression == "payload" and not signature.form.batched:
        expression = _THE_RECORD if signature.decoding is None else _decoded_text(signature.decoding)
    return f"{name}{equals}{expression}"


def _table_text(signature: Signature) -> str:
    return "table_of(messages)" if signature.columns is None else "columns(payload)"


def _decoded_text(decoding: Decoding) -> str:
    if decoding.call is None:
        return "value"
    decoded = "decode(message)" if decoding.of_message else "decode(value)"
    return f"None if value is None else {decoded}" if decoding.optional else decoded


def _batch_payload_text(signature: Signature) -> str:
    """Return the statements that make the first argument.

    If they raise, the error belongs to the record that the iterator `turn` has reached.
    """
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
    # A StopIteration in a decoder (a model's own validator may raise anything) ends `map` as if no value were left.
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

"""From a function's signature to one specialised call.

The signature is read once, when the function is decorated; what cannot work is refused there. What comes out
is a `Binding`: a runner compiled for exactly this function, in which a record costs one loop turn, one
decode and one call. Nothing here knows Kafka, threads or stores.
"""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import sqlite3
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from operator import length_hint
from typing import NamedTuple, Protocol

import msgspec

from kconsume.errors import DecodeError, InvalidHandler
from kconsume.records import Message, Record, record_of

Decode = Callable[[bytes], object]

_KNOWN_TRANSACTIONS: dict[object, str] = {sqlite3.Connection: "sqlite:///file.db"}


class Halt(NamedTuple):
    """Where a runner ended early: on an error, or, with none, before a record because it was told to stop."""

    message: Message
    error: BaseException | None


class Runner(Protocol):
    """Calls the handler for each message in order, until the end, an error, or `stop` is no longer empty."""

    def __call__(
        self, messages: Sequence[Message], stop: Sequence[object], tx: object, scope: str, /
    ) -> Halt | None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Binding:
    """A handler, ready to run."""

    function: Callable[..., object]
    name: str
    payload: str
    """What the first parameter gets, as a person reads it."""
    run: Runner
    decode: Decode | None
    optional: bool
    transaction: type | None
    """The annotation by which the handler asked for the store's transaction."""

    def explain(self, message: Message, error: BaseException) -> BaseException:
        """What really went wrong: the decoder's fault becomes a `DecodeError`, the handler's stays as it is.

        Decoders are pure, so asking again tells the two apart, and the happy path pays nothing for it.
        """
        value = message.value()
        if value is None:
            return error if self.optional else _null(self)
        if self.decode is None:
            return error
        try:
            self.decode(value)
        except Exception as cause:  # noqa: BLE001  (whatever a decoder raises)
            fault = DecodeError(f"the value is not {self.payload}: {cause}")
            fault.__cause__ = cause
            return fault
        return error


def bind(
    function: Callable[..., object],
    transactions: Sequence[type] = (),
    store: str = "kafka://",
    names: Mapping[str, object] | None = None,
) -> Binding:
    """Read the signature. `names` are the local names of the place where the function is decorated."""
    name = getattr(function, "__name__", repr(function))
    parameters = _parameters(function, name)
    hints = _hints(function, name, names)
    payload = _payload(name, parameters[0], hints)
    arguments = [payload.expression]
    transaction: type | None = None
    by_name = False
    for parameter in parameters[1:]:
        hint = hints.get(parameter.name)
        by_name = by_name or parameter.kind is parameter.KEYWORD_ONLY
        if any(hint is offered for offered in transactions):
            transaction, expression = typing.cast(type, hint), "tx"
        elif hint is Record:
            expression = "record_of(message, scope)"
        elif parameter.default is not parameter.empty:
            by_name = True  # what follows would move up into its place
            continue
        else:
            raise _unprovided(name, parameter.name, hint, transactions, store)
        if by_name and parameter.kind is parameter.POSITIONAL_ONLY:
            raise InvalidHandler(
                f"{name} takes {parameter.name} by position only, after a parameter that keeps its default: "
                f"put {parameter.name} before it, or remove the /"
            )
        arguments.append(f"{parameter.name}={expression}" if by_name else expression)
    return Binding(
        function=function,
        name=name,
        payload=payload.text,
        run=_compile(function, payload, arguments),
        decode=payload.decode,
        optional=payload.optional,
        transaction=transaction,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Payload:
    text: str
    expression: str
    decode: Decode | None
    optional: bool


_TEMPLATE = """\
def run(messages, stop, tx, scope):
    if not messages:
        return None
    turn = iter(messages)
    try:
        for {each}:
            if stop:
                return Halt(messages[-1 - length_hint(turn)], None)
            {guard}function({arguments})
    except BaseException as error:
        return Halt(messages[-1 - length_hint(turn)], error)
    return None
"""
# Where the handler asks for the value alone, the message itself is not touched by Python code at all.
_EACH_VALUE = "value in map(type(messages[0]).value, turn)"
_EACH_MESSAGE = "message in turn"
_TAKE_VALUE = "value = message.value()\n            "
_NULL_GUARD = "if value is None: raise NullValue\n            "


def _compile(function: Callable[..., object], payload: _Payload, arguments: Sequence[str]) -> Runner:
    """One function a handler, made of text as dataclasses makes `__init__`: a closure for each argument
    would cost a call a record, more than the rest of the loop."""
    wants_message = any("message" in argument for argument in arguments)
    guard = _NULL_GUARD if payload.decode is None and not payload.optional else ""
    source = _TEMPLATE.format(
        each=_EACH_MESSAGE if wants_message else _EACH_VALUE,
        guard=(_TAKE_VALUE if wants_message else "") + guard,
        arguments=", ".join(arguments),
    )
    scope: dict[str, object] = {
        "length_hint": length_hint,
        "function": function,
        "decode": payload.decode,
        "record_of": record_of,
        "Halt": Halt,
        "NullValue": _NullValue,
    }
    exec(compile(source, f"<kconsume runner of {function!r}>", "exec"), scope)
    return typing.cast(Runner, scope["run"])


class _NullValue(ValueError):
    """Raised by a runner, turned into a `DecodeError` with words by `Binding.explain`."""


def _parameters(function: Callable[..., object], name: str) -> list[inspect.Parameter]:
    if inspect.isclass(function) or not hasattr(function, "__name__") or not callable(function):
        raise InvalidHandler(f"{name} is not a function: decorate a function (def), below @app.consume(...)")
    try:
        innermost = inspect.unwrap(function)
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise InvalidHandler(f"{name} has no signature to read ({error}): call it from a function (def)") from error
    # Behind a decorator too: it would hand the coroutine or generator back, and nobody would run it.
    for layer in (function, innermost):
        if inspect.iscoroutinefunction(layer) or inspect.isasyncgenfunction(layer):
            raise InvalidHandler(f"{name} is async: write it as a plain def; this version runs plain functions only")
        if inspect.isgeneratorfunction(layer):
            raise InvalidHandler(f"{name} is a generator, so calling it would do nothing: remove the yield")
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise InvalidHandler(f"{name} takes {parameter}: name each thing it should get, with its type")
    if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
        raise InvalidHandler(f"{name} has no parameter for the payload: write def {name}(value: bytes)")
    return parameters


def _hints(function: Callable[..., object], name: str, names: Mapping[str, object] | None) -> dict[str, object]:
    try:
        return typing.get_type_hints(function, localns=_visible(function, names or {}))
    except NameError as error:
        raise InvalidHandler(
            f"{name} has an annotation that does not exist at run time ({error}): import it outside "
            f"`if TYPE_CHECKING:`, because the annotation says what the handler gets"
        ) from error
    except Exception as error:  # an annotation is an expression, and may raise anything
        raise InvalidHandler(
            f"{name} has an annotation that cannot be read ({type(error).__name__}: {error}): correct it, because "
            f"the annotation says what the handler gets"
        ) from error


def _visible(function: Callable[..., object], names: Mapping[str, object]) -> dict[str, object]:
    """Of the names where it is decorated, those that it can mean: one that was written in a module, and not in
    a function, means the module's first."""
    innermost = inspect.unwrap(function)
    if "<locals>" in getattr(innermost, "__qualname__", ""):
        return dict(names)
    known = {**vars(builtins), **getattr(innermost, "__globals__", {})}
    return {name: value for name, value in names.items() if name not in known}


def _payload(name: str, parameter: inspect.Parameter, hints: Mapping[str, object]) -> _Payload:
    if parameter.name not in hints:
        raise InvalidHandler(
            f"{name} does not say what {parameter.name!r} is: annotate it, for example "
            f"{parameter.name}: bytes (also str, dict, a msgspec.Struct, a dataclass, Record)"
        )
    hint = hints[parameter.name]
    wanted, optional = _without_none(hint)
    text = _text(hint)
    if wanted is Record:
        return _Payload("Record", "record_of(message, scope)", None, True)
    if wanted is bytes:
        return _Payload(text, "value", None, optional)
    decode = _decoder(name, parameter.name, wanted)
    expression = "None if value is None else decode(value)" if optional else "decode(value)"
    return _Payload(text, expression, decode, optional)


def _without_none(hint: object) -> tuple[object, bool]:
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint, False
    members = typing.get_args(hint)
    rest = tuple(member for member in members if member is not type(None))
    if not rest or len(rest) == len(members):
        return hint, False
    return typing.Union[rest], True  # noqa: UP007  (built from a tuple at run time)


def _decoder(name: str, parameter: str, wanted: object) -> Decode:
    if wanted is str:
        return bytes.decode
    if wanted in (list, tuple, set) or typing.get_origin(wanted) in (list, tuple, set, Sequence):
        raise InvalidHandler(
            f"{name} asks for {_text(wanted)}: this version hands over one record at a time, so annotate "
            f"{parameter} with the type of one record"
        )
    members = typing.get_args(wanted) if _is_union(wanted) else (wanted,)
    for member in members:
        _check_member(name, parameter, member, alone=len(members) == 1)
    try:
        return msgspec.json.Decoder(wanted).decode
    except TypeError as error:
        raise InvalidHandler(
            f"{name} cannot get {parameter}: {_text(wanted)}: {error}; in a union give each "
            f"msgspec.Struct a tag (class Placed(msgspec.Struct, tag=True))"
        ) from error
    except Exception as error:  # the annotations of its fields are expressions, and may raise anything
        raise InvalidHandler(
            f"{name} cannot get {parameter}: {_text(wanted)}: the type of one of its fields cannot be read "
            f"({error}): define or import what its fields name in its module, not in a function"
        ) from error


def _check_member(name: str, parameter: str, member: object, *, alone: bool) -> None:
    if member in (bytes, str, Record) and not alone:
        raise InvalidHandler(
            f"{name} mixes {_text(member)} with other types in {parameter}: nothing tells them apart; "
            f"use {_text(member)} alone and decode in the handler"
        )
    origin = typing.get_origin(member) or member
    supported = origin is dict or (
        isinstance(origin, type)
        and (issubclass(origin, msgspec.Struct) or dataclasses.is_dataclass(origin) or typing.is_typeddict(origin))
    )
    if not supported:
        raise InvalidHandler(
            f"{name} cannot get {parameter}: {_text(member)}: the first parameter is the payload; annotate it "
            f"as bytes, str, dict, a msgspec.Struct, a dataclass, a union of tagged Structs, or Record"
        )


def _is_union(hint: object) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _unprovided(name: str, parameter: str, hint: object, transactions: Sequence[type], store: str) -> InvalidHandler:
    if hint is None:
        return InvalidHandler(
            f"{name} does not say what {parameter!r} is: annotate it with Record, or with the transaction "
            f"of the offset store"
        )
    for known, address in _KNOWN_TRANSACTIONS.items():
        if hint is known:
            return InvalidHandler(
                f"{name} asks for {parameter}: {_text(hint)}, but its offsets are in {store}, which has no such "
                f"transaction: use offsets={address!r}"
            )
    offered = ", ".join(["Record", *map(_text, transactions)])
    return InvalidHandler(
        f"{name} asks for {parameter}: {_text(hint)}, which nobody provides with offsets in {store}: "
        f"it can get {offered}; or give the parameter a default"
    )


def _null(binding: Binding) -> DecodeError:
    return DecodeError(
        f"the value is null (a tombstone), and {binding.name} takes {binding.payload}: "
        f"annotate it as {binding.payload} | None to get tombstones as None"
    )


def _text(hint: object) -> str:
    if isinstance(hint, type) and not typing.get_args(hint):
        return hint.__qualname__.rpartition("<locals>.")[2]
    if _is_union(hint):
        return " | ".join("None" if m is type(None) else _text(m) for m in typing.get_args(hint))
    return str(hint).replace("typing.", "")

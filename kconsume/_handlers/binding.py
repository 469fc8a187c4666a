"""Where each argument of a handler comes from: matches its signature with what is available.

This happens when the handler is decorated. A parameter that nothing provides is refused then. The result is a
`Binding`, which `compiled` turns into a function for exactly this handler. This module must not know threads or stores.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence

from kconsume._handlers.annotations import bare, distinct_names, full_name, text_of, without_none
from kconsume._handlers.batches import Batch
from kconsume._handlers.compiled import AsyncRunner, Limit, Runner, compile_runner
from kconsume._handlers.json_decoder import explain_decode
from kconsume._handlers.signature import Form, Parameter, Returns, Signature, read
from kconsume._handlers.type_providers import TRANSACTION_ADDRESSES, default_resource
from kconsume._handlers.wraps import Wrap
from kconsume._kafka.outgoing import Sender
from kconsume.errors import DecodeError, InvalidHandler
from kconsume.records import Message, Record

MOST_BYTES = 1_000_000
"""The size of the largest message that the client sends by default."""


@dataclasses.dataclass(frozen=True, slots=True)
class Available:
    """What a handler can get besides its payload."""

    transactions: Sequence[type] = ()
    """The types of the store's transaction."""
    async_transactions: Sequence[type] | None = None
    """The types in `transactions` that only an `async def` can use. None if every handler can use every type."""
    store: str = "kafka://"
    """The address of the store, for errors."""
    resources: Mapping[object, str] = dataclasses.field(default_factory=dict)
    """The names of the resources, by the type that they provide."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """A handler, and where each of its arguments comes from."""

    signature: Signature
    arguments: tuple[str, ...]
    transaction: type | None
    """The type of the store's transaction that the handler asks for, or None."""
    resources: Mapping[str, object]
    """The types of the resources, by parameter. The session of a DataFrame is under the DataFrame's parameter."""
    takes_sender: bool
    to: str | None
    """The topic to which return values are sent, or None."""

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
        """True if the handler can send messages."""
        return self.takes_sender or self.to is not None

    def runner(
        self,
        resources: Mapping[object, object] | None = None,
        wraps: Sequence[Wrap] = (),
        max_bytes: int = MOST_BYTES,
        *,
        by_record: bool = False,
        stamped: bool = False,
    ) -> Runner:
        """Return the function that calls a plain handler.

        Args:
            resources: the resources, by type.
            wraps: the context managers around each call, the outermost first.
            max_bytes: the size of the largest message that the handler may send.
            by_record: True to call `tx.next_record(offset)` before each record.
            stamped: True to add the header `kconsume-origin` to each message that the handler sends.
        """
        assert not self.is_async
        return typing.cast(Runner, compile_runner(self, resources or {}, wraps, max_bytes, by_record, stamped))

    def async_runner(
        self,
        resources: Mapping[object, object] | None = None,
        wraps: Sequence[Wrap] = (),
        max_bytes: int = MOST_BYTES,
        *,
        by_record: bool = False,
        stamped: bool = False,
        limit: Limit | None = None,
    ) -> AsyncRunner:
        """Return the function that calls an `async def`. The parameters are those of `runner`.

        Args:
            limit: wraps the handler, so that each call ends at the `timeout=`.
        """
        assert self.is_async
        return typing.cast(
            AsyncRunner, compile_runner(self, resources or {}, wraps, max_bytes, by_record, stamped, limit)
        )

    def can_decode(self, message: Message) -> bool:
        """Return whether the value can be decoded. Calls the decoder, even a decoder of the user."""
        decoding = self.signature.decoding
        if decoding is None:
            return True
        value = message.value()
        if value is None or decoding.call is None:
            return value is not None or decoding.optional
        try:
            decoding.call(message if decoding.of_message else value)
        except Exception:  # noqa: BLE001  (whatever a decoder raises)
            return False
        return True

    def explain(self, message: Message, error: BaseException) -> BaseException:
        """Return the error of a failed record: a `DecodeError` if the decoder raised it, else the handler's own error.

        To find out which of the two raised, this method calls kconsume's decoder again. A decoder of kconsume is pure,
        so the second call is safe, and records that do not fail need no extra work. The user's decoder may not be pure,
        so its exceptions are wrapped in `DecodeError` where they are raised.
        """
        decoding = self.signature.decoding
        if decoding is None:
            return error
        value = message.value()
        if value is None:
            return error if decoding.optional else _null_error(self)
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
    available: Available | Sequence[type] = (),
    *,
    names: Mapping[str, object] | None = None,
    to: str | None = None,
) -> Binding:
    """Return where the arguments of a handler come from. Raises InvalidHandler if something is not available.

    Args:
        handler: the function, or its signature.
        available: what the handler can ask for, or only the types of the store's transaction.
        names: the local names of the place where the function is decorated.
        to: the topic to which return values are sent.
    """
    signature = handler if isinstance(handler, Signature) else read(handler, names)
    available = available if isinstance(available, Available) else Available(available)
    if signature.returns is Returns.SOMETHING and to is None:
        raise InvalidHandler(
            f"{signature.name} returns a value, and nothing takes it: name the topic that it goes to, as in "
            f"@app.consume(..., to='shipped'), or annotate it -> None"
        )
    arguments = [_FIRST_ARGUMENTS[signature.form]]
    transaction: type | None = None
    resources: dict[str, object] = {} if signature.frame is None else {signature.first: signature.frame.resource_type}
    takes_sender = by_name = False
    for parameter in signature.parameters:
        name = parameter.name
        by_name = by_name or parameter.kind is parameter.kind.KEYWORD_ONLY
        hint = bare(without_none(parameter.hint)[0])
        expression = _metadata(signature, parameter)
        if expression is not None:
            pass
        elif any(hint is lent for lent in available.transactions):
            transaction, expression = typing.cast(type, hint), "tx"
            _must_match_async(signature, parameter, available)
            _must_have_one_provider(signature.name, name, hint, available)
        elif hint is Sender:
            takes_sender, expression = True, "sender"
        elif _is_resource(hint, available) or default_resource(hint) is not None:
            expression = f"resource_{name}"
            resources[name] = hint
        elif parameter.has_default:
            by_name = True  # by position, the next arguments would take its place
            continue
        else:
            raise _unavailable(signature, parameter, available)
        if by_name and parameter.kind is parameter.kind.POSITIONAL_ONLY:
            raise InvalidHandler(
                f"{signature.name} takes {name} by position only, after a parameter that keeps its default: "
                f"put {name} before it, or remove the /"
            )
        arguments.append(f"{name}={expression}" if by_name else expression)
    return Binding(signature, tuple(arguments), transaction, resources, takes_sender, to)


_FIRST_ARGUMENTS = {
    Form.ONE: "payload",
    Form.LIST: "payload",
    Form.TABLE: "table",
    Form.FRAME: "frame",
    Form.BATCH: "batch",
}


def _metadata(signature: Signature, parameter: Parameter) -> str | None:
    """Return "record" or "batch" if the parameter asks for that. Raises InvalidHandler if it asks for the other one."""
    name, hint = parameter.name, parameter.hint
    if hint is Record and not signature.form.batched:
        return "record"
    if hint is Batch and signature.form.batched:
        return "batch"
    if hint is Record:
        raise InvalidHandler(
            f"{signature.name} gets {signature.payload} and asks for {name}: Record: a batch has many; ask for "
            f"{name}: Batch"
        )
    if hint is Batch:
        raise InvalidHandler(
            f"{signature.name} gets one record at a time and asks for {name}: Batch: ask for {name}: Record, "
            f"or annotate the payload as list[...]"
        )
    return None


def _is_resource(hint: object, available: Available) -> bool:
    try:
        return hint in available.resources
    except TypeError:  # an annotation that cannot be hashed
        return False


def _must_match_async(signature: Signature, parameter: Parameter, available: Available) -> None:
    """Raise if the transaction would block the event loop, or if a plain function would have to await it."""
    awaited = available.async_transactions
    if awaited is None or (parameter.hint in awaited) == signature.is_async:
        return
    fitting = [text_of(t) for t in available.transactions if (t in awaited) == signature.is_async]
    ask = f"ask for {' or '.join(fitting)}, or make" if fitting else "make"
    kind, other = ("async def", "a plain `def`") if signature.is_async else ("def", "`async def`")
    raise InvalidHandler(
        f"{signature.name} is `{kind}` and asks for {parameter.name}: {text_of(parameter.hint)}: {ask} it {other}"
    )


def _must_have_one_provider(handler: str, name: str, hint: object, available: Available) -> None:
    if _is_resource(hint, available):
        raise InvalidHandler(
            f"{handler} asks for {name}: {text_of(hint)}, which both the store {available.store} (its transaction) "
            f"and the resource {available.resources[hint]} provide: let the resource provide a type of its own"
        )


def _unavailable(signature: Signature, parameter: Parameter, available: Available) -> InvalidHandler:
    handler, name, hint = signature.name, parameter.name, parameter.hint
    if hint is None:
        return InvalidHandler(
            f"{handler} does not say what {name!r} is: annotate it with Record, or with the transaction "
            f"of the offset store"
        )
    address = TRANSACTION_ADDRESSES.get(full_name(hint))
    if address is not None and available.transactions:
        return _other_transaction(signature, parameter, available)
    if address is not None:
        return InvalidHandler(
            f"{handler} asks for {name}: {text_of(hint)}, but its offsets are in {available.store}, which has no "
            f"such transaction: use offsets={address}"
        )
    asked, lent = distinct_names(hint, available.transactions)
    choices = ", ".join(["Record", "Sender", *lent, *map(text_of, available.resources)])
    return InvalidHandler(
        f"{handler} asks for {name}: {asked}, which nobody provides with offsets in {available.store}: "
        f"it can get {choices}; or give the parameter a default, or declare above it an @app.resource that yields it"
    )


def _other_transaction(signature: Signature, parameter: Parameter, available: Available) -> InvalidHandler:
    """Return the error about the transaction of another kind of store.

    The user chose the store, so the error tells them to change the annotation. The types are shown with their
    modules, because several transaction types are called Connection.
    """
    awaited, is_async = available.async_transactions, signature.is_async
    fitting = [kind for kind in available.transactions if awaited is None or (kind in awaited) == is_async]
    lent = " or ".join(f"{parameter.name}: {full_name(kind)}" for kind in fitting or available.transactions)
    define = "" if fitting else f", and make it {'a plain `def`' if is_async else '`async def`'}"
    return InvalidHandler(
        f"{signature.name} asks for {parameter.name}: {full_name(parameter.hint)}, but its offsets are in "
        f"{available.store}, whose transaction is of another type: annotate it as {lent}{define}"
    )


def _null_error(binding: Binding) -> DecodeError:
    wanted = binding.payload
    instead = f"{wanted[:-1]} | None]" if binding.batched else f"{wanted} | None"
    return DecodeError(
        f"the value is null (a tombstone), and {binding.name} takes {wanted}: annotate it as {instead} to get "
        f"tombstones as None"
    )

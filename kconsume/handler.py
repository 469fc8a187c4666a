"""From a signature to one specialised call.

What a handler asks for is matched with what there is, when it is decorated; what nobody provides is refused there.
What comes out is a `Binding`, which `runner.py` compiles into a function for exactly this handler. Nothing here knows
threads or stores.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence

from kconsume.batches import Batch
from kconsume.decoding import bare, explain_decode, full_name, text_of, told_apart, without_none
from kconsume.errors import DecodeError, InvalidHandler
from kconsume.output import Sender
from kconsume.records import Message, Record
from kconsume.runner import AsyncRunner, Limit, Runner, compile_runner
from kconsume.signature import Form, Returns, Signature, Wish, read
from kconsume.spark.sink import is_session, session_type
from kconsume.wrapping import Wrap

MOST_BYTES = 1_000_000
"""What the client sends at most in one message, by default."""

_KNOWN_TRANSACTIONS = {
    "sqlite3.Connection": "'sqlite:///file.db'",
    "psycopg.Connection": "'postgresql://host/database'",
    "psycopg.AsyncConnection": "'postgresql://host/database'",
    "sqlalchemy.orm.session.Session": "PostgresStore(engine=...)",
    "sqlalchemy.ext.asyncio.session.AsyncSession": "PostgresStore(engine=...)",
    "redis.client.Pipeline": "'redis://host/0'",
}
"""By their full names, for nobody imports these packages who does not use them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """What a handler can get beside its payload."""

    transactions: Sequence[type] = ()
    """The types of the store's transaction."""
    async_transactions: Sequence[type] | None = None
    """Those among them that are for `async def`, and for nothing else; None if the store makes no difference."""
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
    """The types of the resources it asks for, by parameter; the session of a DataFrame by that of the DataFrame."""
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
        self,
        resources: Mapping[object, object] | None = None,
        wraps: Sequence[Wrap] = (),
        most: int = MOST_BYTES,
        *,
        by_record: bool = False,
        stamped: bool = False,
    ) -> Runner:
        """For a plain function. `resources` by type; `wraps` from the outermost on; `most`: bytes of a message;
        `by_record`: the transaction is told where each record begins; `stamped`: what is sent says where it came
        from."""
        assert not self.is_async
        return typing.cast(Runner, compile_runner(self, resources or {}, wraps, most, by_record, stamped))

    def async_runner(
        self,
        resources: Mapping[object, object] | None = None,
        wraps: Sequence[Wrap] = (),
        most: int = MOST_BYTES,
        *,
        by_record: bool = False,
        stamped: bool = False,
        limit: Limit | None = None,
    ) -> AsyncRunner:
        """For an `async def`. `limit`: what goes around all of it."""
        assert self.is_async
        return typing.cast(AsyncRunner, compile_runner(self, resources or {}, wraps, most, by_record, stamped, limit))

    def can_decode(self, message: Message) -> bool:
        """Whether the handler would get the record at all. Calls the decoder, also a person's own."""
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
    resources: dict[str, object] = {signature.first: session_type()} if signature.form is Form.FRAME else {}
    takes_sender = by_name = False
    for wish in signature.wishes:
        by_name = by_name or wish.kind is wish.kind.KEYWORD_ONLY
        hint = bare(without_none(wish.hint)[0])
        expression = _metadata(signature, wish)
        if expression is not None:
            pass
        elif any(hint is offered for offered in offer.transactions):
            transaction, expression = typing.cast(type, hint), "tx"
            _must_fit(signature, wish, offer)
            _must_have_one_provider(signature.name, wish.name, hint, offer)
        elif hint is Sender:
            takes_sender, expression = True, "sender"
        elif _is_resource(hint, offer) or is_session(hint):
            expression = f"resource_{wish.name}"
            resources[wish.name] = hint
        elif wish.has_default:
            by_name = True  # what follows would move up into its place
            continue
        else:
            raise _unprovided(signature.name, wish, offer, signature.is_async)
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
    Form.FRAME: "frame",
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


def _must_fit(signature: Signature, wish: Wish, offer: Offer) -> None:
    """A transaction that blocks would hold up the event loop, and one that must be awaited is nothing for a function
    that cannot."""
    awaited = offer.async_transactions
    if awaited is None or (wish.hint in awaited) == signature.is_async:
        return
    fitting = [text_of(t) for t in offer.transactions if (t in awaited) == signature.is_async]
    ask = f"ask for {' or '.join(fitting)}, or make" if fitting else "make"
    kind, other = ("async def", "a plain `def`") if signature.is_async else ("def", "`async def`")
    raise InvalidHandler(
        f"{signature.name} is `{kind}` and asks for {wish.name}: {text_of(wish.hint)}: {ask} it {other}"
    )


def _must_have_one_provider(name: str, parameter: str, hint: object, offer: Offer) -> None:
    if _is_resource(hint, offer):
        raise InvalidHandler(
            f"{name} asks for {parameter}: {text_of(hint)}, which both the store {offer.store} (its transaction) "
            f"and the resource {offer.resources[hint]} provide: let the resource provide a type of its own"
        )


def _unprovided(name: str, wish: Wish, offer: Offer, is_async: bool) -> InvalidHandler:
    parameter, hint = wish.name, wish.hint
    if hint is None:
        return InvalidHandler(
            f"{name} does not say what {parameter!r} is: annotate it with Record, or with the transaction "
            f"of the offset store"
        )
    for known, address in _KNOWN_TRANSACTIONS.items():
        if full_name(hint) == known and offer.transactions:
            return _another_transaction(name, wish, offer, is_async)
        if full_name(hint) == known:
            return InvalidHandler(
                f"{name} asks for {parameter}: {text_of(hint)}, but its offsets are in {offer.store}, which has no "
                f"such transaction: use offsets={address}"
            )
    asked, lent = told_apart(hint, offer.transactions)
    offered = ", ".join(["Record", "Sender", *lent, *map(text_of, offer.resources)])
    return InvalidHandler(
        f"{name} asks for {parameter}: {asked}, which nobody provides with offsets in {offer.store}: "
        f"it can get {offered}; or give the parameter a default, or declare above it an @app.resource that yields it"
    )


def _another_transaction(name: str, wish: Wish, offer: Offer, is_async: bool) -> InvalidHandler:
    """The transaction of another kind of store. Where the offsets are was chosen, so the annotation is what to change;
    with its module, because half of these types are called Connection."""
    awaited = offer.async_transactions
    fitting = [kind for kind in offer.transactions if awaited is None or (kind in awaited) == is_async]
    lent = " or ".join(f"{wish.name}: {full_name(kind)}" for kind in fitting or offer.transactions)
    define = "" if fitting else f", and make it {'a plain `def`' if is_async else '`async def`'}"
    return InvalidHandler(
        f"{name} asks for {wish.name}: {full_name(wish.hint)}, but its offsets are in {offer.store}, whose transaction "
        f"is of another type: annotate it as {lent}{define}"
    )


def _null(binding: Binding) -> DecodeError:
    wanted = binding.payload
    instead = f"{wanted[:-1]} | None]" if binding.batched else f"{wanted} | None"
    return DecodeError(
        f"the value is null (a tombstone), and {binding.name} takes {wanted}: annotate it as {instead} to get "
        f"tombstones as None"
    )

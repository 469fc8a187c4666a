"""Derives a handler's call under Spark from its signature: what each of its parameters gets.

The signature is read once, before a query runs. A parameter that cannot be provided is refused here. The first
parameter is of one of two kinds:

    frame    in the driver: a DataFrame of the whole micro-batch
    rows     in executors: the records of one range, as record batches, a table or `Record`s (`for_each_partition`)
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from kconsume._handlers.annotations import distinct_names, hints_of, text_of
from kconsume._handlers.batches import Batch
from kconsume._handlers.signature import Form as SignatureForm
from kconsume._handlers.signature import Signature
from kconsume.errors import InvalidHandler
from kconsume.records import Record
from kconsume.spark._batch.stream_batch import StreamBatch

Form = Literal["frame", "batches", "table", "records"]
Source = Literal["tx", "batch", "batch_id"]
Handler = Callable[..., object]
H = TypeVar("H", bound=Handler)

_MARK = "__kconsume_for_each_partition__"
_BATCH_ID = ("batch_id", "epoch_id", "batchId", "epochId", "batch", "epoch", "id")


def for_each_partition(handler: H) -> H:
    """Mark a handler of `foreach_batch` as one that runs in the executors.

    The handler is called once for each partition's range of a batch, with the records of that range and a transaction
    of its own. The offset of the range commits in that transaction.

        @for_each_partition
        def load(rows: Iterator[pyarrow.RecordBatch], tx: psycopg.Connection) -> None: ...

    Args:
        handler: its first parameter is an `Iterator[pyarrow.RecordBatch]`, a `pyarrow.Table` or an `Iterator[Record]`.
    """
    setattr(handler, _MARK, True)
    return handler


@dataclass(frozen=True, slots=True)
class HandlerCall:
    """A handler, and what its parameters get."""

    function: Handler
    name: str
    form: Form
    """What the first parameter gets."""
    others: tuple[tuple[str, Source], ...]
    """The names of the other parameters, and what each gets."""

    @property
    def in_executors(self) -> bool:
        return self.form != "frame"

    @property
    def wants_tx(self) -> bool:
        return any(source == "tx" for _, source in self.others)

    def __call__(self, payload: object, tx: object, batch: StreamBatch) -> None:
        given: Mapping[Source, object] = {"tx": tx, "batch": batch, "batch_id": batch.batch_id}
        self.function(payload, **{name: given[source] for name, source in self.others})


def read_call(
    function: Handler, transactions: Sequence[type], store: str, names: Mapping[str, object] | None = None
) -> HandlerCall:
    """The call of a handler that was given to `foreach_batch`.

    Args:
        transactions: the annotations by which a handler can ask for the store's transaction.
        store: the address of the store, for errors.
        names: the local variables of the function that called `foreach_batch`, for annotations that are strings.
    """
    name = getattr(function, "__name__", repr(function))
    hints = hints_of(function, name, "the annotation says what the handler gets", names)
    first, *rest = _parameters(function, name)
    form = _form(name, first, hints.get(first.name), marked=getattr(function, _MARK, False))
    return _call(function, name, form, rest, hints, transactions, store)


def call_of_signature(signature: Signature, transactions: Sequence[type], store: str) -> HandlerCall:
    """The call of an app's handler, whose signature was read at its decoration.

    Args:
        transactions, store: as for `read_call`.
    """
    form = _FORMS.get(signature.form)
    if form is None:
        raise InvalidHandler(
            f"{signature.name} takes {signature.payload}, which a Spark stream cannot pass to a handler: annotate its "
            f"first parameter as DataFrame, or, for a handler that is called in executors, as pyarrow.Table; or run it "
            f"by app.run()"
        )
    rest = _parameters(signature.function, signature.name)[1:]
    hints = {parameter.name: parameter.hint for parameter in signature.parameters}
    return _call(signature.function, signature.name, form, rest, hints, transactions, store)


_FORMS: Mapping[SignatureForm, Form] = {SignatureForm.FRAME: "frame", SignatureForm.TABLE: "table"}


def _call(
    function: Handler,
    name: str,
    form: Form,
    rest: Sequence[inspect.Parameter],
    hints: Mapping[str, object],
    transactions: Sequence[type],
    store: str,
) -> HandlerCall:
    others: list[tuple[str, Source]] = []
    for parameter in rest:
        source = _source(name, parameter, hints.get(parameter.name), transactions, store, form)
        if source is not None:
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise InvalidHandler(f"{name} takes {parameter.name} by position only: remove the /")
            others.append((parameter.name, source))
    return HandlerCall(function, name, form, tuple(others))


def _parameters(function: Handler, name: str) -> list[inspect.Parameter]:
    if inspect.isclass(function) or not callable(function):
        raise InvalidHandler(f"{name} is not a function: give one that takes a DataFrame")
    if inspect.iscoroutinefunction(function):
        raise InvalidHandler(f"{name} is async, and Spark calls it in a thread of its own: write a plain def")
    if inspect.isgeneratorfunction(function):
        raise InvalidHandler(f"{name} is a generator, so calling it would do nothing: remove the yield")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise InvalidHandler(f"{name} has no signature to read ({error}): call it from a function (def)") from error
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise InvalidHandler(f"{name} takes {parameter}: name each thing it should get, with its type")
    if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
        raise InvalidHandler(f"{name} has no parameter for the frame: write def {name}(df: DataFrame)")
    return parameters


def _form(name: str, parameter: inspect.Parameter, hint: object, *, marked: bool) -> Form:
    if _is_named(hint, "pyspark", "DataFrame"):
        if marked:
            raise InvalidHandler(
                f"{name} is for_each_partition, where there are no DataFrames: annotate {parameter.name} as "
                f"Iterator[pyarrow.RecordBatch], pyarrow.Table or Iterator[Record]"
            )
        return "frame"
    if _is_named(hint, "pyarrow", "Table"):
        return "table"
    if typing.get_origin(hint) in (Iterator, typing.get_origin(typing.Iterable[int])):
        (item,) = typing.get_args(hint)
        if item is Record:
            return "records"
        if _is_named(item, "pyarrow", "RecordBatch"):
            return "batches"
    if hint is None:
        return "batches" if marked else "frame"
    raise InvalidHandler(
        f"{name} takes {parameter.name}: {text_of(hint)}, which a Spark stream cannot pass to a handler: annotate it "
        f"as DataFrame, or, for a handler that is called in executors, as pyarrow.Table, "
        f"Iterator[pyarrow.RecordBatch] or Iterator[Record]"
    )


def _source(
    name: str, parameter: inspect.Parameter, hint: object, transactions: Sequence[type], store: str, form: Form
) -> Source | None:
    if any(hint is offered for offered in transactions):
        return "tx"
    if isinstance(hint, type) and issubclass(hint, Batch):
        return "batch"
    if form == "frame" and (hint is int or (hint is None and parameter.name in _BATCH_ID)):
        return "batch_id"
    if hint is None and parameter.name in ("tx", "transaction", "connection") and transactions:
        return "tx"
    if parameter.default is not parameter.empty:
        return None
    kind, lent = distinct_names(hint, transactions)
    offered = ", ".join(["Batch", *lent])
    asked = parameter.name if hint is None else f"{parameter.name}: {kind}"
    raise InvalidHandler(
        f"{name} asks for {asked}, which nobody provides in a stream with offsets in {store}: it can get {offered}; or "
        f"give the parameter a default"
    )


def _is_named(hint: Any, package: str, name: str) -> bool:
    """Compares names, because comparing types would import the package."""
    return isinstance(hint, type) and hint.__name__ == name and hint.__module__.partition(".")[0] == package

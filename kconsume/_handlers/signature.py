"""What a decorated function asks for, read from its signature once, when it is decorated.

A function that cannot be a handler is refused. `binding` finds the values that the function asks for. This module must
not know stores, resources or Kafka.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence

from kconsume._handlers.annotations import bare, hints_of, is_union, metadata_of, text_of
from kconsume._handlers.arrow_columns import Columns
from kconsume._handlers.batches import Batch
from kconsume._handlers.decoding import Decoding, decoding_of
from kconsume._handlers.type_providers import FrameType, frame_type
from kconsume.errors import InvalidHandler
from kconsume.records import Record


class Form(enum.Enum):
    """How many records a call gets, and in which form."""

    ONE = "one record"
    LIST = "a list"
    BATCH = "a Batch"
    TABLE = "a table"
    FRAME = "a DataFrame"

    @property
    def batched(self) -> bool:
        return self is not Form.ONE

    @property
    def tabular(self) -> bool:
        return self in (Form.TABLE, Form.FRAME)


class Returns(enum.Enum):
    """What the annotation says about the result."""

    NOTHING = "nothing"
    SOMETHING = "something"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter after the first one. The type decides which argument the parameter gets."""

    name: str
    hint: object
    """The annotation, or None if there is none."""
    kind: inspect._ParameterKind
    has_default: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """What the signature of a handler function says. Settings of the app are not consulted."""

    function: Callable[..., object]
    name: str
    is_async: bool
    first: str
    """The name of the first parameter."""
    form: Form
    payload: str
    """The type of the first parameter as a user writes it."""
    decoding: Decoding | None
    """None if records are passed on as they are: as `Record`, as `Batch`, or in a table without a model."""
    columns: Columns | None
    """The columns of a table or DataFrame that has a model."""
    frame: FrameType | None
    """How a batch of another package's type is made from an Arrow table."""
    parameters: tuple[Parameter, ...]
    """The parameters after the first one."""
    returns: Returns


def read(
    function: Callable[..., object],
    names: Mapping[str, object] | None = None,
    decode: Callable[..., object] | None = None,
) -> Signature:
    """Return what the function asks for. Raises InvalidHandler if it cannot be a handler.

    Args:
        function: the decorated function.
        names: the local names of the place where the function is decorated.
        decode: what the user passed as `decode=`.
    """
    name = getattr(function, "__name__", repr(function))
    parameters = _parameters(function, name)
    hints = hints_of(function, name, "the annotation says what the handler gets", names, extras=True)
    first = parameters[0]
    if first.name not in hints:
        raise InvalidHandler(
            f"{name} does not say what {first.name!r} is: annotate it, for example "
            f"{first.name}: bytes (also str, dict, a msgspec.Struct, a dataclass, Record)"
        )
    form, item = _form(name, first.name, hints[first.name])
    decoding, columns = None, None
    if item is not None:
        decoding = decoding_of(name, first.name, item, decode)
        columns = Columns(name, item) if form.tabular else None
    elif decode is not None:
        raise InvalidHandler(
            f"{name} gets {text_of(hints[first.name])} with undecoded bytes, so decode= would do nothing: "
            f"annotate {first.name} with the type that decode= makes"
        )
    if form is Form.FRAME and _is_async(function):
        raise InvalidHandler(
            f"{name} is async and gets {first.name}: DataFrame, and every call of Spark would block the event loop: "
            f"write it as a plain def"
        )
    return Signature(
        function=function,
        name=name,
        is_async=_is_async(function),
        first=first.name,
        form=form,
        payload=_batch_text(hints[first.name], columns, item) if decoding is None or form.batched else decoding.text,
        decoding=decoding,
        columns=columns,
        frame=frame_type(bare(hints[first.name])) if form is Form.FRAME else None,
        parameters=tuple(
            Parameter(p.name, bare(hints.get(p.name)), p.kind, p.default is not p.empty) for p in parameters[1:]
        ),
        returns=_returns(hints),
    )


def _parameters(function: Callable[..., object], name: str) -> list[inspect.Parameter]:
    if inspect.isclass(function) or not hasattr(function, "__name__") or not callable(function):
        raise InvalidHandler(f"{name} is not a function: decorate a function (def), below @app.consume(...)")
    try:
        innermost = inspect.unwrap(function)
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise InvalidHandler(f"{name} has no signature to read ({error}): call it from a function (def)") from error
    for layer in (function, innermost):
        if inspect.isgeneratorfunction(layer) or inspect.isasyncgenfunction(layer):
            raise InvalidHandler(f"{name} is a generator, so calling it would do nothing: remove the yield")
    if _is_async(innermost) and not _is_async(function):
        # The decorator returns the coroutine, and an executor for plain functions would never await it.
        raise InvalidHandler(
            f"{name} is async, and its decorator is not: write the decorator's inner function as async def too"
        )
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise InvalidHandler(f"{name} takes {parameter}: name each thing it should get, with its type")
    if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
        raise InvalidHandler(f"{name} has no parameter for the payload: write def {name}(value: bytes)")
    return parameters


def _is_async(function: Callable[..., object]) -> bool:
    return inspect.iscoroutinefunction(function)


# The first parameter


def _form(name: str, parameter: str, hint: object) -> tuple[Form, object | None]:
    """Return the form of a call, and the type that each record is decoded to; None if records are not decoded."""
    wanted = bare(hint)
    if wanted is Record or wanted == Record | None:
        return Form.ONE, None
    if wanted is Batch:
        return Form.BATCH, None
    if _is_table(wanted):
        return Form.TABLE, _model_of(name, parameter, hint)
    if frame_type(wanted) is not None:
        return Form.FRAME, _model_of(name, parameter, hint)
    if typing.get_origin(wanted) is list:
        (item,) = typing.get_args(wanted)
        return Form.LIST, None if item is Record else item
    if wanted in (list, tuple, set) or typing.get_origin(wanted) in (tuple, set, Sequence):
        raise InvalidHandler(
            f"{name} cannot get {parameter}: {text_of(wanted)}: a batch is a list of one type, so annotate "
            f"{parameter} as list[T], for example list[bytes]"
        )
    return Form.ONE, hint


def _model_of(name: str, parameter: str, hint: object) -> object | None:
    """Return the model whose fields are the columns: `Placed` of `Annotated[pyarrow.Table, Placed]`."""
    models = [each for each in metadata_of(hint) if isinstance(each, type) or is_union(each)]
    if len(models) > 1 or any(map(is_union, models)):
        raise InvalidHandler(
            f"{name} cannot get {parameter}: {text_of(hint)} with the columns of {' and '.join(map(text_of, models))}: "
            f"a row has the fields of one model, and a tombstone has none; name one model, without None"
        )
    return models[0] if models else None


def _batch_text(hint: object, columns: Columns | None, model: object) -> str:
    return text_of(hint) if columns is None else f"{text_of(hint)} of {text_of(model)}"


def _is_table(hint: object) -> bool:
    """Return whether the type is `pyarrow.Table`. The name is compared, so that pyarrow is not imported."""
    return isinstance(hint, type) and hint.__name__ == "Table" and hint.__module__.partition(".")[0] == "pyarrow"


# What it returns


def _returns(hints: Mapping[str, object]) -> Returns:
    annotated = hints.get("return", object)
    if annotated in (None, type(None), typing.NoReturn, typing.Never):
        return Returns.NOTHING
    return Returns.UNKNOWN if annotated in (object, typing.Any) else Returns.SOMETHING

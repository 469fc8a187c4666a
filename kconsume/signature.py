"""What a decorated function asks for, read from its signature, once, where it is decorated.

Reads and refuses; what it asks for is found by `handler.py`. Nothing here knows stores, resources or Kafka.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence

from kconsume.annotations import hints_of
from kconsume.batches import Batch
from kconsume.columns import Columns
from kconsume.decoding import Decoding, decoding_of, is_union, text_of
from kconsume.errors import InvalidHandler
from kconsume.records import Record
from kconsume.spark.sink import is_frame


class Form(enum.Enum):
    """How many records a call gets, and as what."""

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
    NOTHING = "nothing"
    SOMETHING = "something"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """A further parameter: something by its type."""

    name: str
    hint: object
    """None where nothing is annotated."""
    kind: inspect._ParameterKind
    has_default: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """A function that can be a handler, as far as can be told from itself."""

    function: Callable[..., object]
    name: str
    is_async: bool
    first: str
    """The name of the first parameter."""
    form: Form
    payload: str
    """What the first parameter gets, as a person reads it."""
    decoding: Decoding | None
    """None where records are handed over as they are: `Record`, `Batch`, and tables of no declared model."""
    columns: Columns | None
    """Those of the model of a table or DataFrame."""
    wishes: tuple[Wish, ...]
    returns: Returns


def read(
    function: Callable[..., object],
    names: Mapping[str, object] | None = None,
    decode: Callable[..., object] | None = None,
) -> Signature:
    """`names` are the local names of the place where the function is decorated."""
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
            f"{name} gets {text_of(hints[first.name])} with the bytes as they came, so decode= would do nothing: "
            f"annotate {first.name} with the type that decode= makes"
        )
    if form is Form.FRAME and _is_async(function):
        raise InvalidHandler(
            f"{name} is async and gets {first.name}: DataFrame, and every call of Spark would hold up the event loop: "
            f"write it as a plain def"
        )
    return Signature(
        function=function,
        name=name,
        is_async=_is_async(function),
        first=first.name,
        form=form,
        payload=_said(hints[first.name], columns, item) if decoding is None or form.batched else decoding.text,
        decoding=decoding,
        columns=columns,
        wishes=tuple(Wish(p.name, _plain(hints.get(p.name)), p.kind, p.default is not p.empty) for p in parameters[1:]),
        returns=_returns(function, hints),
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
        # It hands the coroutine back, and an executor for plain functions would never await it.
        raise InvalidHandler(
            f"{name} is async behind a decorator that is not: write the decorator's inner function as async def too"
        )
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise InvalidHandler(f"{name} takes {parameter}: name each thing it should get, with its type")
    if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
        raise InvalidHandler(f"{name} has no parameter for the payload: write def {name}(value: bytes)")
    return parameters


def _is_async(function: Callable[..., object]) -> bool:
    return inspect.iscoroutinefunction(function)


def _plain(hint: object) -> object:
    """A further parameter's type, without what is only said about it."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


# The first parameter


def _form(name: str, parameter: str, hint: object) -> tuple[Form, object | None]:
    """How records are handed over, and the type that each is decoded to, if they are."""
    wanted = _plain(hint)
    if wanted is Record or wanted == Record | None:
        return Form.ONE, None
    if wanted is Batch:
        return Form.BATCH, None
    if _is_table(wanted) or is_frame(wanted):
        return Form.TABLE if _is_table(wanted) else Form.FRAME, _model_of(name, parameter, hint)
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
    """`Annotated[pyarrow.Table, Placed]`: the model whose fields are the columns."""
    said = typing.get_args(hint)[1:] if typing.get_origin(hint) is typing.Annotated else ()
    models = [each for each in said if isinstance(each, type) or is_union(each)]
    if len(models) > 1 or any(map(is_union, models)):
        raise InvalidHandler(
            f"{name} cannot get {parameter}: {text_of(hint)} with the columns of {' and '.join(map(text_of, models))}: "
            f"a row has the fields of one model, and a tombstone has none; name one, without None"
        )
    return models[0] if models else None


def _said(hint: object, columns: Columns | None, model: object) -> str:
    return text_of(hint) if columns is None else f"{text_of(hint)} of {text_of(model)}"


def _is_table(hint: object) -> bool:
    """By its name: asking for pyarrow would import it."""
    return isinstance(hint, type) and hint.__name__ == "Table" and hint.__module__.partition(".")[0] == "pyarrow"


# What it returns


def _returns(function: Callable[..., object], hints: Mapping[str, object]) -> Returns:
    if "return" not in hints:
        return Returns.UNKNOWN if _may_return_a_value(function) else Returns.NOTHING
    said = hints["return"]
    if said in (None, type(None), typing.NoReturn, typing.Never):
        return Returns.NOTHING
    return Returns.UNKNOWN if said in (object, typing.Any) else Returns.SOMETHING


def _may_return_a_value(function: Callable[..., object]) -> bool:
    """Whether the code has a `return` of anything but None: only then must what comes back be looked at."""
    code = getattr(function, "__code__", None)
    if not isinstance(code, types.CodeType):
        return True
    before: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "RETURN_CONST" and instruction.argval is not None:
            return True
        if instruction.opname == "RETURN_VALUE":
            none = before is not None and before.opname.startswith("LOAD_CONST") and before.argval is None
            if not none:
                return True
        before = instruction
    return False

"""What a decorated function asks for, read from its signature, once, where it is decorated.

Reads and refuses; what it asks for is found by `handler.py`. Nothing here knows stores, resources or Kafka.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import enum
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence

from kconsume.batches import Batch
from kconsume.decoding import Decoding, decoding_of, text_of
from kconsume.errors import InvalidHandler
from kconsume.records import Record


class Form(enum.Enum):
    """How many records a call gets, and as what."""

    ONE = "one record"
    LIST = "a list"
    BATCH = "a Batch"
    TABLE = "a table"

    @property
    def batched(self) -> bool:
        return self is not Form.ONE


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
    form: Form
    payload: str
    """What the first parameter gets, as a person reads it."""
    decoding: Decoding | None
    """None where records are handed over as they are: `Record`, `Batch` and tables."""
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
    hints = _hints(function, name, names)
    first = parameters[0]
    if first.name not in hints:
        raise InvalidHandler(
            f"{name} does not say what {first.name!r} is: annotate it, for example "
            f"{first.name}: bytes (also str, dict, a msgspec.Struct, a dataclass, Record)"
        )
    form, item = _form(name, first.name, hints[first.name])
    decoding = None
    if item is not None:
        decoding = decoding_of(name, first.name, item, decode)
    elif decode is not None:
        raise InvalidHandler(
            f"{name} gets {text_of(hints[first.name])} with the bytes as they came, so decode= would do nothing: "
            f"annotate {first.name} with the type that decode= makes"
        )
    return Signature(
        function=function,
        name=name,
        is_async=_is_async(function),
        form=form,
        payload=text_of(hints[first.name]) if decoding is None or form.batched else decoding.text,
        decoding=decoding,
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


def _hints(function: Callable[..., object], name: str, names: Mapping[str, object] | None) -> dict[str, object]:
    try:
        return typing.get_type_hints(function, localns=_visible(function, names or {}), include_extras=True)
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
    if _is_table(wanted):
        return Form.TABLE, None
    if typing.get_origin(wanted) is list:
        (item,) = typing.get_args(wanted)
        return Form.LIST, None if item is Record else item
    if wanted in (list, tuple, set) or typing.get_origin(wanted) in (tuple, set, Sequence):
        raise InvalidHandler(
            f"{name} cannot get {parameter}: {text_of(wanted)}: a batch is a list of one type, so annotate "
            f"{parameter} as list[T], for example list[bytes]"
        )
    return Form.ONE, hint


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

"""Settings from `KCONSUME_*` variables, which override those in the code.

    KCONSUME_BROKERS, _GROUP, _OFFSETS, _INSTANCE, _STARTUP, _SHUTDOWN, _MEMORY     as `App(...)` takes them
    KCONSUME_KAFKA_SECURITY_PROTOCOL                           kafka={"security.protocol": ...}
    KCONSUME_HANDLER_RESERVE_CONCURRENCY                       as `@app.consume(...)` takes it, for `def reserve`

This file turns text into values, and raises if text cannot be read. This file must not read `os.environ`.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar, get_args

from kconsume._config.client_settings import ClientValue, check_overrides, masked_address, scheme_in
from kconsume._config.options import Executor, HandlerOptions, Repeats, StartPolicy
from kconsume._handlers.batches import Batching
from kconsume._handlers.rate import Rate
from kconsume.errors import ConfigurationError
from kconsume.failures.policy import Retries
from kconsume.failures.retry import Retry
from kconsume.failures.retry_topics import RetryTopics

PREFIX = "KCONSUME_"
_KAFKA = "KAFKA_"
_HANDLER = "HANDLER_"

# Read elsewhere: by the command line, the demo and the tests.
_READ_ELSEWHERE = frozenset({"APP", "LOG_FORMAT", "LOG_LEVEL"})
_FAMILIES_READ_ELSEWHERE = ("TEST_", "DEMO_")

# The only librdkafka property with an underscore that takes a text; the others are callbacks.
_UNDERSCORED = {"log.level": "log_level"}

_OUR_VARIABLE = {
    "bootstrap.servers": "KCONSUME_BROKERS",
    "metadata.broker.list": "KCONSUME_BROKERS",
    "group.id": "KCONSUME_GROUP",
    "group.instance.id": "KCONSUME_INSTANCE",
    "auto.offset.reset": "KCONSUME_HANDLER_<NAME>_START",
}

_CLOSE = 0.75
"""How similar an unknown name must be to a known one to count as a misspelling of it (`difflib`)."""

_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}

Value = TypeVar("Value", covariant=True)


class UnreadVariable(NamedTuple):
    """A variable that is set and that nothing reads."""

    name: str
    hint: str
    """What to do, with the likely correct name."""

    def __str__(self) -> str:
        return f"{self.name} is set, but nothing reads it: {self.hint}"


@dataclass(frozen=True, slots=True)
class Environment:
    """The values of the variables, checked; None for a variable that is not set. The repr shows no secret."""

    brokers: str | None = None
    group: str | None = None
    offsets: str | None = field(default=None, repr=False)
    instance: str | None = None
    shutdown: float | None = None
    memory: int | None = None
    kafka: Mapping[str, ClientValue] = field(default_factory=dict, repr=False)
    handlers: Mapping[str, Mapping[str, object]] = field(default_factory=dict, repr=False)
    """The option values of each handler, by the name of the handler as written in the variables."""
    strays: tuple[str, ...] = ()
    """Names of variables that nothing reads, with any handlers."""
    startup: float | None = None

    def options_of(self, handler: str, options: HandlerOptions) -> HandlerOptions:
        """Return the options of a handler. Values of its variables replace those in the code.

        Handlers of the same name in different modules share their variables.
        """
        given: Mapping[str, Any] = self.handlers.get(handler.upper(), {})
        return replace(options, **given) if given else options

    def unread(self, handlers: Iterable[str]) -> list[UnreadVariable]:
        """Return the variables that are set and not read.

        Args:
            handlers: the names of the app's handlers.
        """
        names = {name.upper() for name in handlers}
        idle = [
            f"{PREFIX}{_HANDLER}{name}_{option.upper()}"
            for name, options in self.handlers.items()
            if name not in names
            for option in options
        ]
        return [_unread(variable, names) for variable in sorted((*self.strays, *idle))]


def sets(variable: str) -> bool:
    """Whether a variable is a setting of an app, and not one of the command line or the tests."""
    name = variable.removeprefix(PREFIX)
    return variable != name and name not in _READ_ELSEWHERE and not name.startswith(_FAMILIES_READ_ELSEWHERE)


def read(environ: Mapping[str, str]) -> Environment:
    """Parse and check every `KCONSUME_*` variable. An empty one counts as not set."""
    given = {name: text for name, text in environ.items() if name.startswith(PREFIX) and text.strip()}
    kafka: dict[str, ClientValue] = {}
    handlers: dict[str, dict[str, object]] = {}
    strays: list[str] = []
    for variable, text in given.items():
        name = variable.removeprefix(PREFIX)
        handler, option = _handler_option(name)
        if name.startswith(_KAFKA) and name != _KAFKA:
            kafka[_property(variable, text)] = text
        elif handler:
            handlers.setdefault(handler, {})[option] = _OPTIONS[option].read(variable, text)
        elif not _is_read(name):
            strays.append(variable)
    return Environment(
        brokers=_setting(given, "BROKERS", _TEXT),
        group=_setting(given, "GROUP", _TEXT),
        offsets=_setting(given, "OFFSETS", _ADDRESS),
        instance=_setting(given, "INSTANCE", _TEXT),
        startup=_setting(given, "STARTUP", _PATIENCE),
        shutdown=_setting(given, "SHUTDOWN", _SECONDS),
        memory=_setting(given, "MEMORY", _BYTES),
        kafka=kafka,
        handlers=handlers,
        strays=tuple(strays),
    )


# Names


def _handler_option(name: str) -> tuple[str, str]:
    """Split `HANDLER_RESERVE_STOCK_GROUP` into handler and option; two empty texts for other names.

    No option ends with the name of another option, so a name can be split in only one way.
    """
    rest = name.removeprefix(_HANDLER)
    if rest != name:
        for option in _OPTIONS:
            handler = rest.removesuffix(f"_{option.upper()}")
            if handler not in ("", rest):
                return handler, option
    return "", ""


def _property(variable: str, text: str) -> str:
    """Return the property that a variable sets: `KCONSUME_KAFKA_SECURITY_PROTOCOL` sets `security.protocol`.

    The value stays text, which the client parses.
    """
    dotted = variable.removeprefix(PREFIX + _KAFKA).lower().replace("_", ".")
    name = _UNDERSCORED.get(dotted, dotted)
    if name in _OUR_VARIABLE:
        raise ConfigurationError(f"{variable} is refused: set {_OUR_VARIABLE[name]} instead")
    try:
        check_overrides({name: text})
    except ConfigurationError as error:
        raise ConfigurationError(f"{variable} is refused: {error}") from error
    return name


def _is_read(name: str) -> bool:
    return name in _SETTINGS or name in _READ_ELSEWHERE or name.startswith(_FAMILIES_READ_ELSEWHERE)


def _unread(variable: str, handlers: Iterable[str]) -> UnreadVariable:
    meant = _meant(variable.removeprefix(PREFIX), handlers)
    fix = f"did you mean {PREFIX}{meant}?" if meant else "remove it, or see docs/configuration.md for the names"
    return UnreadVariable(variable, fix)


def _meant(name: str, handlers: Iterable[str]) -> str | None:
    """Return the known name that is most similar, without `KCONSUME_`; None if none is similar."""
    first, _, rest = name.partition("_")
    family = difflib.get_close_matches(first, ("KAFKA", "HANDLER"), 1)
    if family == ["KAFKA"] and rest:
        return f"{_KAFKA}{rest}"
    if family == ["HANDLER"]:
        options = [f"{handler}_{option.upper()}" for handler in sorted(handlers) for option in _OPTIONS]
        close = difflib.get_close_matches(rest, options, 1, _CLOSE)
        return f"{_HANDLER}{close[0]}" if close else None
    return next(iter(difflib.get_close_matches(name, sorted(_SETTINGS | _READ_ELSEWHERE), 1, _CLOSE)), None)


# Values


class _Form(NamedTuple, Generic[Value]):
    """How a value is written.

    Attributes:
        parse: raises ValueError or ConfigurationError for a text that is not such a value.
        written: the form, with an example, for error messages.
        secret: whether the text may hold a password.
    """

    parse: Callable[[str], Value]
    written: str
    secret: bool = False

    def read(self, variable: str, text: str) -> Value:
        try:
            return self.parse(text.strip())
        except (ValueError, ConfigurationError):
            shown = masked_address(text) if self.secret or scheme_in(text) else text
            # `from None`: the cause may show a secret.
            raise ConfigurationError(f"{variable}={shown!r} cannot be read: write {self.written}") from None


def _setting(given: Mapping[str, str], name: str, form: _Form[Value]) -> Value | None:
    variable = PREFIX + name
    return form.read(variable, given[variable]) if variable in given else None


def _whole(text: str) -> int:
    if not re.fullmatch(r"[0-9]+", text):  # int() takes 1_000 and ٣ as well
        raise ValueError
    return int(text)


def _above_zero(text: str) -> int:
    if (number := _whole(text)) < 1:
        raise ValueError
    return number


def _seconds(text: str) -> float:
    if not 0 < (seconds := float(text)) < math.inf:
        raise ValueError
    return seconds


def _patience(text: str) -> float:
    if not 0 <= (seconds := float(text)) < math.inf:
        raise ValueError
    return seconds


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]+)\s*([kmg]?)i?b?", text, re.IGNORECASE)
    if match is None or int(match[1]) < 1:
        raise ValueError
    return int(match[1]) * _UNITS[match[2].lower()]


def _address(text: str) -> str:
    if scheme_in(text) is None:
        raise ValueError
    return text


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError
    return names


def _rate(text: str) -> Rate:
    records, slash, per = text.partition("/")
    return Rate(_whole(records), float(per)) if slash else Rate(_whole(records))


def _retry(text: str) -> Retries:
    here, plus, later = text.partition("+")
    attempts, slash, wait = here.partition("/")
    in_place = Retry(_whole(attempts), wait=float(wait) if slash else None) if here else None
    topics = RetryTopics(tuple(map(float, _names(later)))) if plus else None
    both = tuple(retry for retry in (in_place, topics) if retry is not None)
    return both if len(both) > 1 else both[0]


def _batch(text: str) -> Batching:
    records, slash, wait = text.partition("/")
    return Batching(_whole(records), float(wait)) if slash else Batching(_whole(records))


def _choice(*choices: str) -> _Form[str]:
    def parse(text: str) -> str:
        return choices[choices.index(text)]

    return _Form(parse, " or ".join(choices))


_TEXT = _Form(str, "a name")
_COUNT = _Form(_above_zero, "a whole number above zero, for example 8")
_SECONDS = _Form(_seconds, "seconds above zero, for example 25.0")
_PATIENCE = _Form(_patience, "seconds, for example 60.0, or 0 for no wait")
_BYTES = _Form(_bytes, "bytes above zero, for example 67108864, 512k, 64M or 1G")
_ADDRESS = _Form(_address, "an address, for example kafka:// or sqlite:///shop.db", secret=True)

_SETTINGS = frozenset({"BROKERS", "GROUP", "OFFSETS", "INSTANCE", "STARTUP", "SHUTDOWN", "MEMORY"})

# The app refuses values that this version does not support, in the same way as values in the code.
_OPTIONS: Mapping[str, _Form[object]] = {
    "topics": _Form(_names, "names separated by commas, for example orders,payments"),
    "pattern": _Form(str, "a regular expression, for example orders-.*"),
    "group": _TEXT,
    "offsets": _ADDRESS,
    "concurrency": _COUNT,
    "chunk": _COUNT,
    "executor": _choice(*get_args(Executor)),
    "start": _choice(*get_args(StartPolicy)),
    "on_error": _choice("stop", "hold", "skip"),
    "order": _choice("partition", "key", "none"),
    "to": _TEXT,
    "rate": _Form(_rate, "records, or records/seconds, above zero, for example 50 or 50/1.0"),
    "timeout": _SECONDS,
    "retry": _Form(
        _retry,
        "attempts, or attempts/seconds between them; then + and the delays of retry topics, for example 5/0.5+60,600",
    ),
    "repeats": _choice(*get_args(Repeats)),
    "batch": _Form(_batch, "records, or records/seconds to wait, for example 500 or 500/0.2"),
    "partitions": _Form(
        lambda text: tuple(map(_whole, _names(text))), "partition numbers separated by commas, for example 0,1"
    ),
}

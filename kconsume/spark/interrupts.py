"""Whether an error is Spark asking the query to stop, and how that is passed on.

Pure: texts in, an answer out. An interrupt is never a handler's failure: it is not tried again, no record is blamed for
it, and it is never swallowed, because Spark takes a handler that returns normally for a batch that is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_NAMES = (
    "java.lang.InterruptedException",
    "java.io.InterruptedIOException",
    "java.nio.channels.ClosedByInterruptException",
)
_LOST = (
    "KafkaIllegalStateException",
    "OffsetOutOfRangeException",
    "KAFKA_DATA_LOSS",
    "Some data may have been lost",
    "data was aged out by Kafka",
)

# Spark knows an interrupt that comes through Python by these words, and by nothing else (SPARK-39218). It looks for
# them with a regular expression that overflows the stack on the long message of the real error: this one is short.
_WORDS = (
    "py4j.protocol.Py4JJavaError: An error occurred while calling kconsume.\n"
    ": java.lang.InterruptedException: the query is being stopped\n"
)


class Interrupted(Exception):
    """Spark is stopping the query: this batch is not acknowledged, and comes again."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{_WORDS}({why})")


def interrupted(why: str) -> Interrupted:
    """To be raised `from None`: of a chain, Spark would get the whole text."""
    return Interrupted(why)


def is_interrupt(texts: Sequence[str], *, active: bool) -> bool:
    """`texts`: what the error says, and those that it came from. `active`: whether the query is still to run; in one
    that is not, every error may be that of a job that was cancelled."""
    return not active or any(name in text for text in texts for name in _NAMES)


def is_data_loss(texts: Sequence[str]) -> bool:
    """Whether it is Spark's Kafka source saying that records are gone."""
    return any(name in text for text in texts for name in _LOST)


def data_loss_in(texts: Sequence[str]) -> str | None:
    """The line in which Spark's Kafka source says that records are gone; None if it does not."""
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return next((line for line in lines if is_data_loss([line])), None)


def texts_of(error: BaseException) -> list[str]:
    """What an error and those behind it say. That of py4j asks its JVM, which may be gone."""
    return [_said(each) for each in _chain(error)]


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _said(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  (whatever a gateway raises that is gone)
        return type(error).__name__

"""Recognizes the errors by which Spark interrupts a query to stop it, and makes the error that passes the interrupt on.

Pure: texts in, a result out. An interrupt is not a failure of the handler: the batch is not retried, and there is no
search for failing records. An interrupt must not be swallowed: if the handler returns normally, Spark regards the batch
as done.
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

# Spark recognizes an interrupt that comes through Python by these words only (SPARK-39218). It searches for them with a
# regular expression, which overflows the stack on the long message of the original error. So this message is short.
_WORDS = (
    "py4j.protocol.Py4JJavaError: An error occurred while calling kconsume.\n"
    ": java.lang.InterruptedException: the query is being stopped\n"
)


class QueryInterrupted(Exception):
    """Spark is stopping the query: this batch is not committed, and is run again later."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{_WORDS}({why})")


def interrupted(why: str) -> QueryInterrupted:
    """The error to raise. Raise it `from None`: otherwise Spark gets the texts of all errors that led to it."""
    return QueryInterrupted(why)


def is_interrupt(texts: Sequence[str], *, active: bool) -> bool:
    """True if the error is an interrupt.

    Args:
        texts: the texts of the error and of its causes.
        active: False if the query was stopped; then any error may come from a cancelled job.
    """
    return not active or any(name in text for text in texts for name in _NAMES)


def is_data_loss(texts: Sequence[str]) -> bool:
    """True if Spark's Kafka source reports that records are gone."""
    return any(name in text for text in texts for name in _LOST)


def data_loss_line(texts: Sequence[str]) -> str | None:
    """The line in which Spark's Kafka source reports that records are gone; None if there is none."""
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return next((line for line in lines if is_data_loss([line])), None)


def error_texts(error: BaseException) -> list[str]:
    """The texts of an error and of its causes."""
    return [_text(each) for each in _chain(error)]


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  (errors of py4j ask the JVM for their text, and the JVM may be gone)
        return type(error).__name__

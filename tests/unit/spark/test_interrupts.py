"""Which errors are Spark asking to stop: never a handler's failure, never swallowed."""

from __future__ import annotations

import re

import pytest

from kconsume.spark._batch.interrupts import QueryInterrupted, error_texts, is_data_loss, is_interrupt

# As StreamExecution has it: what comes through Python is an interrupt if its text matches this.
SPARKS_OWN = re.compile(
    r"py4j.protocol.Py4JJavaError: An error occurred while calling(.|\r\n|\r|\n)*"
    r"(java\.lang\.InterruptedException|java\.io\.InterruptedIOException|java\.nio\.channels\.ClosedByInterruptException)"
)


@pytest.mark.parametrize(
    "name",
    [
        "java.lang.InterruptedException",
        "java.io.InterruptedIOException",
        "java.nio.channels.ClosedByInterruptException",
    ],
)
def test_an_interrupt_is_known_by_its_java_name_wherever_it_stands_in_the_chain(name: str) -> None:
    error = ValueError("the handler's own words")
    error.__context__ = RuntimeError(f"An error occurred while calling o1.count.\n: {name}\n\tat …")
    assert is_interrupt(error_texts(error), active=True)


def test_an_error_of_a_handler_is_none_while_the_query_is_to_run() -> None:
    assert not is_interrupt(error_texts(ValueError("bad record")), active=True)


def test_every_error_of_a_query_that_was_stopped_is_taken_for_one() -> None:
    assert is_interrupt(error_texts(ValueError("Job 3 cancelled part of cancelled job group")), active=False)


def test_what_is_raised_is_what_spark_takes_for_an_interrupt() -> None:
    assert SPARKS_OWN.search(
        f"kconsume.spark._batch.interrupts.QueryInterrupted: {QueryInterrupted('the query was draining')}"
    )
    assert len(str(QueryInterrupted("the query was draining"))) < 200


def test_records_that_are_gone_are_no_failure_of_the_handler() -> None:
    assert is_data_loss(["org.apache.spark.sql.kafka010.KafkaIllegalStateException: [KAFKA_DATA_LOSS…"])
    assert not is_data_loss(["ValueError: bad record"])


def test_an_error_that_cannot_say_what_it_is_does_not_hide_the_others() -> None:
    class Gone(Exception):
        def __str__(self) -> str:
            raise OSError("the gateway is gone")

    error = Gone()
    error.__cause__ = RuntimeError("java.lang.InterruptedException")
    assert is_interrupt(error_texts(error), active=True)


def test_a_chain_that_goes_round_comes_to_an_end() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert [text[-3:] for text in error_texts(one)] == ["one", "two"]

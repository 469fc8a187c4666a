"""What is checked about a user's own query, from the properties that Spark shows. No JVM is used."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from py4j.protocol import Py4JError
from pyspark.sql import DataFrame

from kconsume.errors import ConfigurationError
from kconsume.spark import for_each_partition
from kconsume.spark._batch.handler_call import HandlerCall, read_call
from kconsume.spark._stream.query_checks import check_query, source_brokers
from kconsume.spark._stream.running_query import RunningQuery


@for_each_partition
def of_tables(table: pa.Table) -> None: ...
def of_frames(df: DataFrame) -> None: ...


IN_EXECUTORS, IN_DRIVER = (read_call(function, (), "memory://") for function in (of_tables, of_frames))


class ShownQuery(RunningQuery):
    """A query whose source has these options; None if Spark does not show them."""

    def __init__(self, options: Mapping[str, str] | None) -> None:
        self.id = "query-7"
        self._execution = SimpleNamespace(logicalPlan=self._plan)
        self._options = options

    @property
    def kind(self) -> str:
        return "MicroBatchExecution"

    def _plan(self) -> Any:
        if self._options is None:
            raise Py4JError("Method relation([]) does not exist")
        source = SimpleNamespace(
            getClass=lambda: SimpleNamespace(getSimpleName=lambda: "StreamingDataSourceV2ScanRelation"),
            relation=lambda: SimpleNamespace(options=lambda: self._options),
        )
        leaves = Leaves([source])
        return SimpleNamespace(collectLeaves=lambda: leaves)


class Leaves(list[Any]):
    """A sequence of Scala."""

    def size(self) -> int:
        return len(self)

    def apply(self, index: int) -> Any:
        return self[index]


def events(caplog: pytest.LogCaptureFixture) -> list[tuple[str, Mapping[str, object]]]:
    return [(cast(Any, record).event, cast(Any, record).fields) for record in caplog.records]


def check(options: Mapping[str, str] | None, call: HandlerCall) -> None:
    check_query(ShownQuery(options), call, stateful=False)


def test_options_that_spark_does_not_show_are_logged_as_not_checked(caplog: pytest.LogCaptureFixture) -> None:
    check(None, IN_EXECUTORS)
    ((event, fields),) = events(caplog)
    assert event == "source options not checked"
    assert fields["options"] == ["minPartitions", "maxRecordsPerPartition"]
    assert (fields["query"], fields["handler"]) == ("query-7", "of_tables")
    assert "look at its readStream" in str(fields["hint"])


@pytest.mark.parametrize(
    ("options", "call"), [({}, IN_EXECUTORS), ({"subscribe": "orders"}, IN_EXECUTORS), (None, IN_DRIVER)]
)
def test_control_nothing_is_logged_if_the_options_are_shown_or_do_no_harm(
    options: Mapping[str, str] | None, call: HandlerCall, caplog: pytest.LogCaptureFixture
) -> None:
    check(options, call)
    assert events(caplog) == []


@pytest.mark.parametrize("name", ["minPartitions", "maxRecordsPerPartition"])
def test_an_option_that_splits_ranges_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}='6' splits ranges"):
        check({name: "6"}, IN_EXECUTORS)


@pytest.mark.parametrize("options", [None, {}])
def test_brokers_that_cannot_be_read_must_be_given(options: Mapping[str, str] | None) -> None:
    with pytest.raises(ConfigurationError, match="the brokers of the query's source cannot be determined"):
        source_brokers(ShownQuery(options), {})

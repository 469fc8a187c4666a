"""Messages as a `pyarrow.Table`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kconsume._handlers.arrow import schema, table_of
from kconsume.errors import MissingExtra
from kconsume.records import Message, record_of
from tests.unit.fakes import FakeMessage, messages_at

Row = dict[str, object]

payloads = st.none() | st.binary(max_size=20)
timestamps = st.tuples(
    st.sampled_from([0, 1, 2]),
    st.integers(1_600_000_000_000, 1_800_000_000_000)
    | st.integers(-(2**63), 2**63 - 1)
    | st.sampled_from([-1, 0, -62_135_596_800_001, -62_135_596_800_000, 253_402_300_799_999, 253_402_300_800_000]),
)
headers = st.none() | st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=5)), max_size=3)


with_gaps = st.sets(st.integers(0, 2**63 - 1) | st.integers(0, 50), max_size=40).map(sorted)
without_gaps = st.builds(
    lambda first, count: list(range(first, first + count)), st.integers(0, 2**63 - 41), st.integers(0, 40)
)


@st.composite
def batches(draw: st.DrawFn) -> list[FakeMessage]:
    """Of one partition, in order, with gaps."""
    topic = draw(st.text("abc.-_", min_size=1, max_size=9))
    partition = draw(st.integers(0, 2**31 - 1))
    offsets = draw(without_gaps | with_gaps)
    return [
        FakeMessage(
            draw(payloads), offset=offset, key=draw(payloads), topic=topic, partition=partition,
            headers=draw(headers), timestamp=draw(timestamps),
        )
        for offset in offsets
    ]  # fmt: skip


def row_of(message: Message) -> Row:
    """The same, the plain way. Timestamps as `Record` has them; what a header's value is, null included."""
    return {
        "key": message.key(),
        "value": message.value(),
        "topic": message.topic(),
        "partition": message.partition(),
        "offset": message.offset(),
        "timestamp": record_of(message, "").timestamp,
        "headers": [{"key": name, "value": value} for name, value in message.headers() or ()] or None,
    }


def rows_of(messages: Sequence[Message]) -> list[Row]:
    table = table_of(messages)
    table.validate(full=True)
    assert table.schema.equals(schema())
    return table.to_pylist()


class TestTheTable:
    @given(batches())
    def test_has_each_record_as_a_row(self, messages: list[FakeMessage]) -> None:
        assert rows_of(messages) == [row_of(message) for message in messages]

    def test_has_the_columns_of_sparks_kafka_source(self) -> None:
        assert [f"{field.name}: {field.type}" for field in schema()] == [
            "key: binary",
            "value: binary",
            "topic: string",
            "partition: int32",
            "offset: int64",
            "timestamp: timestamp[ms, tz=UTC]",
            "headers: list<item: struct<key: string, value: binary>>",
        ]

    def test_has_the_same_columns_when_it_has_no_rows(self) -> None:
        assert rows_of([]) == []

    @pytest.mark.parametrize("count", [1, 2, 3, 4, 31, 32, 33, 1000])
    def test_names_the_topic_in_every_row_of_batches_of_any_size(self, count: int) -> None:
        for topic in ("orders", "payments"):
            messages = [FakeMessage(offset=n, topic=topic) for n in range(count)]
            assert table_of(messages).column("topic").to_pylist() == [topic] * count

    @pytest.mark.parametrize(
        "offsets", [[7], [7, 8, 9], [7, 9], [7, 8, 10], [7, 9, 10], [2**63 - 2, 2**63 - 1]], ids=str
    )
    def test_has_the_offsets_with_and_without_gaps(self, offsets: list[int]) -> None:
        assert table_of(messages_at(offsets)).column("offset").to_pylist() == offsets

    def test_has_headers_only_where_a_record_has_some(self) -> None:
        messages = [
            FakeMessage(offset=1),
            FakeMessage(offset=2, headers=[("trace", b"1"), ("trace", None), ("", b"")]),
            FakeMessage(offset=3, headers=[]),
        ]
        assert [row["headers"] for row in rows_of(messages)] == [
            None,
            [{"key": "trace", "value": b"1"}, {"key": "trace", "value": None}, {"key": "", "value": b""}],
            None,
        ]

    @pytest.mark.parametrize("timestamp", [(0, -1), (0, 1_700_000_000_123), (1, 2**63 - 1), (1, -(2**62))])
    def test_has_no_timestamp_where_there_is_none_or_no_date_can_hold_it(self, timestamp: tuple[int, int]) -> None:
        """Arrow would take any 64 bits, and fail when the table is read."""
        assert rows_of([FakeMessage(timestamp=timestamp)])[0]["timestamp"] is None

    def test_lives_on_when_the_messages_are_gone(self) -> None:
        messages = [FakeMessage(b"%d" % n, offset=n) for n in range(100)]
        table = table_of(messages)
        del messages
        assert table.column("value").to_pylist() == [b"%d" % n for n in range(100)]

    def test_a_value_that_is_no_bytes_is_an_error_and_not_a_crash(self) -> None:
        with pytest.raises((pa.ArrowInvalid, pa.ArrowTypeError)):
            table_of([FakeMessage(5)])  # type: ignore[arg-type]


class TestPyarrow:
    def test_is_not_imported_before_a_table_is_asked_for(self) -> None:
        program = "import sys, kconsume, kconsume._handlers.arrow; print('pyarrow' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert done.stdout == "False\n"

    def test_is_named_with_the_fix_when_it_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        schema.cache_clear()
        with pytest.raises(MissingExtra, match=r"needs pyarrow, which is not installed: pip install pyarrow"):
            table_of(messages_at([1]))
        monkeypatch.undo()
        assert table_of(messages_at([1])).num_rows == 1

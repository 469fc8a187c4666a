"""docs/spark.md: its samples of streams are taken as they stand, and its table of decisions is the one that is used."""

from __future__ import annotations

import re
from pathlib import Path

from kconsume import App
from kconsume.spark import ForeachBatch
from kconsume.spark._batch.handler_call import call_of_signature
from kconsume.spark._batch.ledger.base import connection_types
from kconsume.spark._stream.kafka_options import FETCH

PAGE = (Path(__file__).parents[3] / "docs" / "spark.md").read_text()
STREAMS = PAGE.partition("## Streaming queries")[2]


def sample(number: int) -> dict[str, object]:
    names: dict[str, object] = {"__name__": "sample"}
    text = re.findall(r"```python\n(.*?)```", STREAMS, re.DOTALL)[number]
    exec(compile(text, "docs/spark.md", "exec"), names)
    return names


def test_the_handler_of_the_app_can_be_streamed() -> None:
    app = sample(0)["app"]
    assert isinstance(app, App)
    (registration,) = app.registrations
    call = call_of_signature(
        registration.binding.signature, connection_types(registration.store), "postgresql://localhost/shop"
    )
    assert (call.form, call.others) == ("frame", (("tx", "tx"),))


def test_the_handler_of_ones_own_query_is_taken() -> None:
    batches = sample(1)["batches"]
    assert isinstance(batches, ForeachBatch)
    assert (batches.call.form, batches.name, batches.group) == ("batches", "copy_clicks", "clicks-etl")


def test_the_fetch_settings_are_those_that_are_set() -> None:
    for name, said in {
        "max.partition.fetch.bytes": "8 MB",
        "fetch.max.bytes": "64 MB",
        "max.poll.records": "20 000",
        "fetch.max.wait.ms": "20",
    }.items():
        assert f"`{name}` {said}" in STREAMS
        number = int(said.split()[0]) * 1024 * 1024 if said.endswith("MB") else int(said.replace(" ", ""))
        assert FETCH[f"kafka.{name}"] == str(number)
    assert len(FETCH) == 4

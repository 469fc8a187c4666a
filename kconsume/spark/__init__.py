"""Spark: handlers of DataFrames in an app, sinks, and streaming queries with kconsume's promises.

Importing this imports neither Spark nor pyarrow: each name is looked up when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kconsume.lazy import lazily

if TYPE_CHECKING:
    from kconsume.spark.batch import StreamBatch
    from kconsume.spark.calls import for_each_partition
    from kconsume.spark.foreach import ForeachBatch, foreach_batch
    from kconsume.spark.ranges import OffsetRange
    from kconsume.spark.remote import request_stop, starting_offsets
    from kconsume.spark.session import check_connector, open_session
    from kconsume.spark.spark_sink import SparkSink
    from kconsume.spark.streams import Stream, stream

__all__ = [
    "ForeachBatch",
    "OffsetRange",
    "SparkSink",
    "Stream",
    "StreamBatch",
    "check_connector",
    "for_each_partition",
    "foreach_batch",
    "open_session",
    "request_stop",
    "starting_offsets",
    "stream",
]

_HOMES = {
    "ForeachBatch": "foreach",
    "OffsetRange": "ranges",
    "SparkSink": "spark_sink",
    "Stream": "streams",
    "StreamBatch": "batch",
    "check_connector": "session",
    "for_each_partition": "calls",
    "foreach_batch": "foreach",
    "open_session": "session",
    "request_stop": "remote",
    "starting_offsets": "remote",
    "stream": "streams",
}

__getattr__, __dir__ = lazily(__name__, _HOMES, globals())

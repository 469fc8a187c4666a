"""Spark: handlers of DataFrames in an app, sinks, and streaming queries with kconsume's promises.

Importing this package imports neither Spark nor pyarrow: each name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kconsume._lazy import lazily

if TYPE_CHECKING:
    from kconsume.spark._batch.handler_call import for_each_partition
    from kconsume.spark._batch.ranges import OffsetRange
    from kconsume.spark._batch.stream_batch import StreamBatch
    from kconsume.spark._sink.dataframes import to_dataframe
    from kconsume.spark._sink.spark_sink import SparkSink
    from kconsume.spark._stream.control import request_stop, starting_offsets
    from kconsume.spark._stream.foreach_batch import ForeachBatch, foreach_batch
    from kconsume.spark._stream.stream import Stream, stream
    from kconsume.spark.session import check_connector, open_session

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
    "to_dataframe",
]

_MODULES = {
    "ForeachBatch": "kconsume.spark._stream.foreach_batch",
    "OffsetRange": "kconsume.spark._batch.ranges",
    "SparkSink": "kconsume.spark._sink.spark_sink",
    "Stream": "kconsume.spark._stream.stream",
    "StreamBatch": "kconsume.spark._batch.stream_batch",
    "check_connector": "kconsume.spark.session",
    "for_each_partition": "kconsume.spark._batch.handler_call",
    "foreach_batch": "kconsume.spark._stream.foreach_batch",
    "open_session": "kconsume.spark.session",
    "request_stop": "kconsume.spark._stream.control",
    "starting_offsets": "kconsume.spark._stream.control",
    "stream": "kconsume.spark._stream.stream",
    "to_dataframe": "kconsume.spark._sink.dataframes",
}

__getattr__, __dir__ = lazily(__name__, _MODULES, globals())

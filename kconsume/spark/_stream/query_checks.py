"""Refuses, before a record is read, queries and handlers whose ranges cannot be determined or applied once.

Rules and messages only; `RunningQuery` reads the properties of a query.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

from kconsume._config.client_settings import ClientValue
from kconsume.errors import ConfigurationError, InvalidHandler, MissingExtra

if TYPE_CHECKING:
    from kconsume.failures.policy import Policy
    from kconsume.spark._batch.handler_call import HandlerCall
    from kconsume.spark._batch.ledger.base import Ledger
    from kconsume.spark._stream.running_query import RunningQuery

SPLITTING = ("minPartitions", "maxRecordsPerPartition")
_BROKERS, _SECURITY = "kafka.bootstrap.servers", "kafka.security.protocol"
_ASYNC = "asyncprogresstrackingenabled"
_OURS = {
    "startingoffsets": "the query begins at the stored offsets; for partitions without one, set start= of @app.consume",
    "startingtimestamp": "the query begins at the stored offsets",
    "startingoffsetsbytimestamp": "the query begins at the stored offsets",
    "startingoffsetsbytimestampstrategy": "the query begins at the stored offsets",
    "endingoffsets": "a stream has no end; use trigger={'availableNow': True} to stop at the present end of the topics",
    "endingoffsetsbytimestamp": "a stream has no end",
    "subscribe": "give the topics to @app.consume",
    "subscribepattern": "give pattern= to @app.consume",
    "assign": "give partitions= to @app.consume",
    "kafka.bootstrap.servers": "give the brokers to the app: App('host:port,...')",
    "failondataloss": "deleted records must end the query with an error, and must not be skipped",
    "kafka.group.id": "Spark does not commit to this group; kconsume mirrors the offsets to the app's group",
}


def check_handler(call: HandlerCall, policy: Policy, ledger: Ledger, address: str) -> None:
    """Refuse a handler that this store or Spark cannot serve.

    Args:
        address: the address of the store, for messages.
    """
    if policy.retry_topics is not None:
        raise ConfigurationError(
            f"{call.name} has RetryTopics, which are read by an embedded app, and a Spark query reads only its own "
            f"topics: use retry=Retry(...), and on_error=DeadLetter(...)"
        )
    if policy.holds_partition:
        raise ConfigurationError(
            f"{call.name} has on_error='hold', which holds a single partition, and a Spark query processes all its "
            f"partitions in one batch: use on_error='stop', 'skip' or DeadLetter(...)"
        )
    if not ledger.exactly_once and (call.in_executors or policy.dead_letter is not None):
        what = "is for_each_partition" if call.in_executors else "has a DeadLetter"
        raise ConfigurationError(
            f"{call.name} {what}, which needs offsets, dead letters and rows in one transaction, and {address} cannot "
            f"do that from Spark: keep the offsets in PostgreSQL (postgresql://host/database)"
        )
    if call.in_executors:
        _check_pandas(call)
        from pyspark import cloudpickle

        try:
            cast(Any, cloudpickle).dumps((call, policy))
        except Exception as error:
            raise InvalidHandler(
                f"{call.name} is called in executors and cannot be pickled ({type(error).__name__}: {error}): do not "
                f"refer to connections, locks, clients or the Spark session from outside; open them inside the handler"
            ) from error


def _check_pandas(call: HandlerCall) -> None:
    """Check pandas and pyarrow now. `mapInArrow` would check them only in the first batch."""
    from pyspark.sql.pandas import utils

    try:
        utils.require_minimum_pandas_version()
        utils.require_minimum_pyarrow_version()
    except ImportError as error:
        raise MissingExtra(
            f"{call.name} is called in executors by Spark's mapInArrow, which needs another package: {error} Install "
            f"it here and where the executors run: pip install 'kconsume[spark]'"
        ) from error


def check_query(query: RunningQuery, call: HandlerCall, *, stateful: bool) -> None:
    """Check a user's own query, in its first batch and before a partition is claimed.

    Args:
        stateful: True if the query's checkpoint has a state folder.
    """
    if stateful:
        _refuse_state(query.stateful_operators())
    if query.kind.startswith("AsyncProgressTracking"):
        _refuse_async()
    if "Continuous" in query.kind:
        _refuse_continuous()
    if call.in_executors:  # in the driver, ranges that are split over tasks do no harm
        check_splitting(query.source_options(SPLITTING), call)


def check_options(options: Mapping[str, str], call: HandlerCall) -> None:
    """Check the user's options of a query of `stream`."""
    for name in options:
        if name.lower() in _OURS:
            raise ConfigurationError(f"options={{{name!r}: …}} is refused: {_OURS[name.lower()]}")
        if name.lower().startswith(_ASYNC[:21]):
            _refuse_async()
    check_splitting(options, call)


def check_splitting(options: Mapping[str, str], call: HandlerCall) -> None:
    splitting = {name.lower() for name in SPLITTING}
    for name in options:
        if call.in_executors and name.lower() in splitting:
            raise ConfigurationError(
                f"{call.name} is called once for each partition's range, and {name}={options[name]!r} splits ranges at "
                f"offsets that the rows do not show: leave it out, or take a DataFrame"
            )


def check_trigger(trigger: Mapping[str, object]) -> None:
    if trigger.get("continuous") is not None:
        _refuse_continuous()
    if trigger.get("realTime") is not None:
        _refuse_continuous()


def source_brokers(query: RunningQuery, kafka: Mapping[str, ClientValue]) -> str:
    """The brokers of the query's source. If they require authentication, the user must give `kafka`."""
    options = query.source_options((_BROKERS, _SECURITY))
    brokers = options.get(_BROKERS)
    if brokers is None:
        raise ConfigurationError(
            "the brokers of the query's source cannot be determined, and kconsume must compare the ids of its topics: "
            "write foreach_batch(…, brokers='host:port')"
        )
    if options.get(_SECURITY, "PLAINTEXT").upper() != "PLAINTEXT" and not kafka:
        raise ConfigurationError(
            f"the query's source connects to {brokers} with {_SECURITY}={options[_SECURITY]!r}, and kconsume needs a "
            f"connection of its own: write foreach_batch(…, brokers=…, kafka={{'security.protocol': …}}), with "
            f"librdkafka's properties"
        )
    return brokers


def _refuse_state(operators: Sequence[str]) -> NoReturn:
    what = ", ".join(operators) or "there is a state folder in its checkpoint"
    raise ConfigurationError(
        f"the query keeps state from one batch to the next ({what}), and foreach_batch commits ranges of offsets. "
        f"Rows that Spark emits later, such as a closed window in a batch without new records, belong to no range and "
        f"would be lost. No record was read. Choose: give foreach_batch the records as they come, and aggregate, join "
        f"or deduplicate in the handler, in a table and through its transaction; or write this query to a topic with "
        f"writeStream.format('kafka'), and read that topic with foreach_batch; or give this query to Spark's own "
        f"foreachBatch, with the guarantee at least once. A query without state needs a new checkpoint folder"
    )


def _refuse_async() -> NoReturn:
    raise ConfigurationError(
        "asyncProgressTrackingEnabled lets batches run before their offsets are written, so what a batch covers is not "
        "known: leave it out"
    )


def _refuse_continuous() -> NoReturn:
    raise ConfigurationError(
        "a continuous or real-time trigger has no batches, and no foreachBatch: use trigger={'processingTime': '1 "
        "second'} or {'availableNow': True}"
    )

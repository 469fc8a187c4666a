"""What a query must not be, for ranges to be known and applied once: refused before a record is read.

Words and rules only; what a query is, is asked of `query.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, cast

from kconsume.errors import ConfigurationError, InvalidHandler, MissingExtra
from kconsume.settings import ClientValue

if TYPE_CHECKING:
    from kconsume.failures.policy import Policy
    from kconsume.spark.calls import Call
    from kconsume.spark.ledger import Ledger
    from kconsume.spark.query import Query

SPLITTING = ("minPartitions", "maxRecordsPerPartition")
_BROKERS, _SECURITY = "kafka.bootstrap.servers", "kafka.security.protocol"
_ASYNC = "asyncprogresstrackingenabled"
_OURS = {
    "startingoffsets": "the store says where to begin; say start= to @app.consume for partitions without an offset",
    "startingtimestamp": "the store says where to begin",
    "startingoffsetsbytimestamp": "the store says where to begin",
    "startingoffsetsbytimestampstrategy": "the store says where to begin",
    "endingoffsets": "a stream has no end; use trigger={'availableNow': True} to stop at what is there",
    "endingoffsetsbytimestamp": "a stream has no end",
    "subscribe": "say the topics to @app.consume",
    "subscribepattern": "say pattern= to @app.consume",
    "assign": "say partitions= to @app.consume",
    "kafka.bootstrap.servers": "say App('host:port,...')",
    "failondataloss": "records that are gone are an error, never a silent gap",
    "kafka.group.id": "Spark does not use it to commit, and its offsets are mirrored to the app's group",
}


def check_handler(call: Call, policy: Policy, ledger: Ledger, address: str) -> None:
    """Refuse what cannot work, before anything runs."""
    if policy.retry_topics is not None:
        raise ConfigurationError(
            f"{call.name} has RetryTopics, which are read by an embedded app, and a Spark query reads its own topics "
            f"alone: use retry=Retry(...), and on_error=DeadLetter(...)"
        )
    if policy.holds:
        raise ConfigurationError(
            f"{call.name} has on_error='hold', which stops one partition of an embedded app, and a Spark query takes "
            f"all its partitions at once: use on_error='stop', 'skip' or DeadLetter(...)"
        )
    if not ledger.exactly_once and (call.in_executors or policy.dead_letter is not None):
        what = "is for_each_partition" if call.in_executors else "has a DeadLetter"
        raise ConfigurationError(
            f"{call.name} {what}, for which ranges, letters and rows must commit together, and {address} cannot "
            f"do that from Spark: keep the offsets in PostgreSQL (postgresql://host/database)"
        )
    if call.in_executors:
        _must_have_pandas(call)
        from pyspark import cloudpickle

        try:
            cast(Any, cloudpickle).dumps((call, policy))
        except Exception as error:
            raise InvalidHandler(
                f"{call.name} is called in executors and cannot be pickled ({type(error).__name__}: {error}): leave "
                f"connections, locks, clients and the Spark session out of what it refers to, and open them inside it"
            ) from error


def _must_have_pandas(call: Call) -> None:
    """As `mapInArrow` asks for it, and pyarrow, in the first batch."""
    from pyspark.sql.pandas import utils

    try:
        utils.require_minimum_pandas_version()
        utils.require_minimum_pyarrow_version()
    except ImportError as error:
        raise MissingExtra(
            f"{call.name} is called in executors, by Spark's mapInArrow, for which this is missing: {error} Install it "
            f"here and where the executors run: pip install 'kconsume[spark]'"
        ) from error


def check_query(query: Query, call: Call, *, stateful: bool) -> None:
    """Of a query that has begun: in its first batch, before a partition is claimed. `stateful`: whether its checkpoint
    has state."""
    if stateful:
        _refuse_state(query.stateful_operators())
    if query.kind.startswith("AsyncProgressTracking"):
        _refuse_async()
    if "Continuous" in query.kind:
        _refuse_continuous()
    if call.in_executors:  # else it splits nothing of ours, and need not be asked for
        check_splitting(query.source_options(SPLITTING), call)


def check_options(options: Mapping[str, str], call: Call) -> None:
    """Of a query that is about to be made."""
    for name in options:
        if name.lower() in _OURS:
            raise ConfigurationError(f"options={{{name!r}: …}} is refused: {_OURS[name.lower()]}")
        if name.lower().startswith(_ASYNC[:21]):
            _refuse_async()
    check_splitting(options, call)


def check_splitting(options: Mapping[str, str], call: Call) -> None:
    splitting = {name.lower() for name in SPLITTING}
    for name in options:
        if call.in_executors and name.lower() in splitting:
            raise ConfigurationError(
                f"{call.name} is called once for each partition's range, and {name}={options[name]!r} splits ranges, "
                f"whose rows do not show where: leave it out, or take a DataFrame"
            )


def check_trigger(trigger: Mapping[str, object]) -> None:
    if trigger.get("continuous") is not None:
        _refuse_continuous()
    if trigger.get("realTime") is not None:
        _refuse_continuous()


def source_brokers(query: Query, kafka: Mapping[str, ClientValue]) -> str:
    """Of the query's own source; where they ask who is there, a person must say it."""
    options = query.source_options((_BROKERS, _SECURITY))
    brokers = options.get(_BROKERS)
    if brokers is None:
        raise ConfigurationError(
            "the brokers of the query's source cannot be found out, and its topics' ids must be compared: say "
            "foreach_batch(…, brokers='host:port')"
        )
    if options.get(_SECURITY, "PLAINTEXT").upper() != "PLAINTEXT" and not kafka:
        raise ConfigurationError(
            f"the query's source talks to {brokers} with {_SECURITY}={options[_SECURITY]!r}, and kconsume must ask the "
            f"cluster too: say foreach_batch(…, brokers=…, kafka={{'security.protocol': …}}), with librdkafka's "
            f"properties"
        )
    return brokers


def _refuse_state(operators: Sequence[str]) -> NoReturn:
    what = ", ".join(operators) or "there is a state folder in its checkpoint"
    raise ConfigurationError(
        f"the query keeps state from one batch to the next ({what}), and foreach_batch commits ranges of offsets: what "
        f"Spark emits later, such as a closed window in a batch without new records, belongs to no range and would be "
        f"lost. Nothing was read or passed. Choose: give foreach_batch the records as they come, and aggregate, join "
        f"or deduplicate in the handler, in a table and through its transaction; or write this query to a topic with "
        f"writeStream.format('kafka'), and read that topic with foreach_batch; or give this query to Spark's own "
        f"foreachBatch, at least once. A query without state needs a new checkpoint folder"
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

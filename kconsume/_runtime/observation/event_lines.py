"""The log lines of events: one line for each, with a constant name. `docs/log-events.md` lists them."""

from __future__ import annotations

from kconsume._event_log import EventLog
from kconsume._runtime.observation.events import (
    BrokerTrouble,
    ClaimFailed,
    Events,
    PartitionFenced,
    PartitionHeld,
    PartitionReleased,
    PartitionsAssigned,
    PartitionsLost,
    PartitionStandsStill,
    PartitionStopped,
    PartitionTriedAgain,
    RebalanceEnded,
)
from kconsume.errors import HandlerFailed

_rebalance_log = EventLog("rebalance")
_loop_log = EventLog("loop")


def log_events(events: Events) -> None:
    """Write a line for each of these events."""
    events.subscribe(PartitionsAssigned, _assigned)
    events.subscribe(PartitionsLost, _lost)
    events.subscribe(RebalanceEnded, _rebalance_ended)
    events.subscribe(ClaimFailed, _claim_failed)
    events.subscribe(PartitionStopped, _stopped)
    events.subscribe(PartitionFenced, _fenced)
    events.subscribe(PartitionHeld, _held)
    events.subscribe(PartitionTriedAgain, _tried_again)
    events.subscribe(PartitionReleased, _released)
    events.subscribe(PartitionStandsStill, _stands_still)
    events.subscribe(BrokerTrouble, _broker_trouble)


def _assigned(event: PartitionsAssigned) -> None:
    _rebalance_log.info("partitions assigned", partitions=len(event.offsets), at=event.offsets)


def _lost(event: PartitionsLost) -> None:
    _rebalance_log.warning("partitions lost", partitions=event.partitions, effect="nothing was committed")


def _rebalance_ended(event: RebalanceEnded) -> None:
    rebalance = event.rebalance
    if not (rebalance.gained or rebalance.gone) and rebalance.success:
        return  # no partition changed hands, so there is nothing to log
    work = {"drained": rebalance.drained, "dropped": rebalance.dropped, "abandoned": rebalance.abandoned}
    _rebalance_log.info(
        "rebalance ended",
        reason=rebalance.reason,
        protocol=rebalance.protocol,
        gained=rebalance.gained,
        gone=rebalance.gone,
        kept=len(rebalance.kept),
        seconds=rebalance.duration,
        **{name: records for name, records in work.items() if records},
        success=rebalance.success,
    )


def _claim_failed(event: ClaimFailed) -> None:
    _rebalance_log.error("claim failed", partitions=event.partitions, again_in=event.again_in, cause=event.cause)


def _stopped(event: PartitionStopped) -> None:
    _rebalance_log.warning("partition stopped", partition=event.partition, again_in=event.again_in, cause=event.cause)


def _fenced(event: PartitionFenced) -> None:
    then = "claimed again when the broker has confirmed the membership"
    if event.is_refused_claim:
        _rebalance_log.warning("claim refused", partition=event.partition, cause=event.cause, effect=then)
    else:
        _rebalance_log.warning("partition fenced", partition=event.partition, cause=event.cause, effect=then)


def _held(event: PartitionHeld) -> None:
    partition, code, cause = event.partition, event.code, event.cause
    if event.seconds is not None:
        return _rebalance_log.error(
            "partition still held", partition=partition, code=code, seconds=round(event.seconds), cause=cause
        )
    more = {"hint": event.hint} if event.hint else {}
    trace = cause.__cause__ if isinstance(cause, HandlerFailed) else None
    return _rebalance_log.error("partition held", partition=partition, code=code, cause=cause, **more, exc_info=trace)


def _tried_again(event: PartitionTriedAgain) -> None:
    _rebalance_log.info("partition tried again", partition=event.partition, code=event.code, reason=event.reason)


def _released(event: PartitionReleased) -> None:
    _rebalance_log.info("partition released", partition=event.partition, code=event.code)


def _stands_still(event: PartitionStandsStill) -> None:
    _loop_log.warning(
        "partition stands still",
        partition=event.partition,
        code=event.cause.code,
        seconds=round(event.seconds),
        cause=event.cause.detail,
    )


def _broker_trouble(event: BrokerTrouble) -> None:
    _loop_log.warning("broker trouble", times=event.times, last=event.last, effect="the client tries again")

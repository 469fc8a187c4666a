"""Outboxes that are broken on purpose, each in one way, and the tests of `OutboxSuite` that must notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from kconsume._kafka.outgoing import Outgoing
from kconsume.backends.outbox.tables import ALL_TARGETS, NO_TARGETS, UNOWNED, Posted, Targets
from kconsume.errors import Fenced, StoreUnavailable
from kconsume.records import Partition
from kconsume.testing.conformance import OutboxSuite as B
from kconsume.testing.conformance import Subject
from tests.contract.broken_stores import Broken, Promise
from tests.contract.queue_outbox import QueueOutbox, QueueOutboxTx, chosen, outbox_subject


class OutboxControl(NamedTuple):
    store: type[QueueOutbox]
    promise: Promise

    def __str__(self) -> str:
        return f"{self.store.__name__}-{self.promise.__name__}"

    def subject(self) -> Subject:
        return outbox_subject(self.store())


OUTBOX_CONTROLS: list[OutboxControl] = []
_S = TypeVar("_S", bound=type[QueueOutbox])


def fails(*promises: Promise) -> Callable[[_S], _S]:
    """The tests that must not pass on this store."""

    def listed(store: _S) -> _S:
        OUTBOX_CONTROLS.extend(OutboxControl(store, promise) for promise in promises)
        return store

    return listed


@fails(
    B.test_outbox_rows_are_rolled_back_with_their_transaction,
    B.test_an_outbox_row_is_visible_only_after_its_transaction_has_committed,
)
class PostsAtOnce(QueueOutbox):
    """On a connection beside the transaction."""

    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[QueueOutboxTx]:
        with super().transaction(group, partition, epoch) as tx:
            beside: Any = tx
            beside.post = lambda outgoing: self.leave(group, partition, outgoing)
            yield tx


@fails(B.test_a_fenced_transaction_leaves_no_outbox_rows)
class PostsBehindTheFence(QueueOutbox):
    def begin(self, group: str, partition: Partition, epoch: int) -> None: ...

    def end(self, group: str, partition: Partition, epoch: int, tx: Any) -> None:
        try:
            super().end(group, partition, epoch, tx)
        except Fenced:
            self.leave(group, partition, tx.posted)
            raise


class Changed(QueueOutbox):
    """What is kept of a record is another one."""

    def leave(self, group: str, partition: Partition, outgoing: Sequence[Outgoing]) -> None:
        super().leave(group, partition, [self.kept(each) for each in outgoing])

    def kept(self, outgoing: Outgoing) -> Outgoing:
        raise NotImplementedError


@fails(B.test_an_outbox_row_keeps_every_field_of_its_record)
class NoTombstones(Changed):
    def kept(self, outgoing: Outgoing) -> Outgoing:
        return replace(outgoing, value=outgoing.value or b"")


@fails(B.test_an_outbox_row_keeps_every_field_of_its_record)
class HeadersByName(Changed):
    def kept(self, outgoing: Outgoing) -> Outgoing:
        return replace(outgoing, headers=tuple(dict(outgoing.headers).items()))


@fails(B.test_an_outbox_row_keeps_every_field_of_its_record)
class WholeSeconds(Changed):
    def kept(self, outgoing: Outgoing) -> Outgoing:
        moment: datetime | None = outgoing.timestamp
        return replace(outgoing, timestamp=moment and moment.replace(microsecond=0))


@fails(B.test_outbox_rows_are_read_in_the_order_of_writing_up_to_the_limit)
class LatestFirst(QueueOutbox):
    def leave(self, group: str, partition: Partition, outgoing: Sequence[Outgoing]) -> None:
        super().leave(group, partition, outgoing)
        self.rows.setdefault((group, partition), []).sort(key=lambda row: -row.number)


@fails(B.test_outbox_rows_are_read_in_the_order_of_writing_up_to_the_limit)
class AllAtOnce(QueueOutbox):
    def posted(
        self, group: str, epochs: Mapping[Partition, int], most: int, targets: Mapping[Partition, Targets] = NO_TARGETS
    ) -> dict[Partition, list[Posted]]:
        return super().posted(group, epochs, 1_000_000, targets)


@fails(B.test_outbox_rows_can_be_read_for_some_topics_or_for_all_other_topics)
class ReadsAllTopics(QueueOutbox):
    def posted(
        self, group: str, epochs: Mapping[Partition, int], most: int, targets: Mapping[Partition, Targets] = NO_TARGETS
    ) -> dict[Partition, list[Posted]]:
        return super().posted(group, epochs, most)


@fails(B.test_outbox_rows_can_be_read_for_some_topics_or_for_all_other_topics)
class CountsBeforeItChooses(QueueOutbox):
    """Rows that are held would keep those behind them from being seen."""

    def posted(
        self, group: str, epochs: Mapping[Partition, int], most: int, targets: Mapping[Partition, Targets] = NO_TARGETS
    ) -> dict[Partition, list[Posted]]:
        found = super().posted(group, epochs, most)
        return {p: chosen(rows, targets.get(p)) for p, rows in found.items()}


@fails(B.test_outbox_rows_can_be_read_for_some_topics_or_for_all_other_topics)
class StraysToAllTopics(QueueOutbox):
    def unowned_rows(self, owner: str, most: int, targets: Targets | None = None) -> list[Posted]:
        return super().unowned_rows(owner, most)


@fails(B.test_all_rows_above_a_number_are_read)
class SkipsOne(QueueOutbox):
    """The first row that was not read yet."""

    def posted(
        self, group: str, epochs: Mapping[Partition, int], most: int, targets: Mapping[Partition, Targets] = NO_TARGETS
    ) -> dict[Partition, list[Posted]]:
        further = {p: each._replace(above=each.above and each.above + 1) for p, each in targets.items()}
        return super().posted(group, epochs, most, further)


@fails(B.test_all_rows_above_a_number_are_read)
class AboveForAll(QueueOutbox):
    """What was read of one partition counts for the others."""

    def posted(
        self, group: str, epochs: Mapping[Partition, int], most: int, targets: Mapping[Partition, Targets] = NO_TARGETS
    ) -> dict[Partition, list[Posted]]:
        above = max((each.above for each in targets.values()), default=0)
        further = {p: targets.get(p, ALL_TARGETS)._replace(above=above) for p in epochs}
        return super().posted(group, epochs, most, further)


@fails(B.test_only_outbox_rows_of_the_partition_and_group_are_read)
class OneGroup(QueueOutbox):
    def leave(self, group: str, partition: Partition, outgoing: Sequence[Outgoing]) -> None:
        super().leave(group and "any", partition, outgoing)

    def posted(
        self, group: str, epochs: Mapping[Partition, int], most: int, targets: Mapping[Partition, Targets] = NO_TARGETS
    ) -> dict[Partition, list[Posted]]:
        return {p: rows for p in epochs if (rows := chosen(self.rows.get(("any", p), []), targets.get(p))[:most])}


@fails(B.test_reading_or_deleting_no_outbox_rows_does_nothing)
class AllForNone(QueueOutbox):
    """An empty list is taken for no condition."""

    def delivered(self, group: str, numbers: Mapping[Partition, Sequence[int]]) -> None:
        if any(numbers.values()):
            super().delivered(group, numbers)
        else:
            self.rows.clear()


@fails(
    B.test_a_stale_epoch_reads_no_outbox_rows_and_the_next_owner_reads_them,
    B.test_after_a_reclaim_outbox_rows_are_read_under_the_new_epoch,
)
class AnyEpoch(QueueOutbox):
    def is_ours(self, group: str, partition: Partition, epoch: int) -> bool:
        return True


@fails(B.test_a_stale_epoch_reads_no_outbox_rows_and_the_next_owner_reads_them)
class AllOrNone(QueueOutbox):
    """One partition that is not ours, and nothing is read of the others either."""

    def posted(
        self, group: str, epochs: Mapping[Partition, int], most: int, targets: Mapping[Partition, Targets] = NO_TARGETS
    ) -> dict[Partition, list[Posted]]:
        found = super().posted(group, epochs, most, targets)
        return found if len(found) == len(epochs) else {}


@fails(B.test_only_delivered_outbox_rows_are_deleted)
class DeletesUpTo(QueueOutbox):
    def delivered(self, group: str, numbers: Mapping[Partition, Sequence[int]]) -> None:
        for partition, gone in numbers.items():
            rows = self.rows.get((group, partition), [])
            self.rows[group, partition] = [row for row in rows if row.number > max(gone, default=0)]


@fails(B.test_only_delivered_outbox_rows_are_deleted)
class DeletesOnce(QueueOutbox):
    def delivered(self, group: str, numbers: Mapping[Partition, Sequence[int]]) -> None:
        there = {row.number for rows in self.rows.values() for row in rows}
        if not {number for gone in numbers.values() for number in gone} <= there:
            raise Broken("no such row")
        super().delivered(group, numbers)


@fails(B.test_delivered_outbox_rows_of_several_partitions_are_deleted_together)
class DeletesOfTheFirst(QueueOutbox):
    def delivered(self, group: str, numbers: Mapping[Partition, Sequence[int]]) -> None:
        super().delivered(group, dict(list(numbers.items())[:1]))


@fails(B.test_an_outbox_row_that_a_zombie_delivered_is_deleted_too)
class OwnersDelete(QueueOutbox):
    """Whoever has read last."""

    reader = 0

    def posted(
        self, group: str, epochs: Mapping[Partition, int], most: int, targets: Mapping[Partition, Targets] = NO_TARGETS
    ) -> dict[Partition, list[Posted]]:
        self.reader = max(epochs.values(), default=0)
        return super().posted(group, epochs, most, targets)

    def delivered(self, group: str, numbers: Mapping[Partition, Sequence[int]]) -> None:
        if all(self._rows[group, partition].epoch == self.reader for partition in numbers):
            super().delivered(group, numbers)


@fails(B.test_the_number_of_an_outbox_row_is_never_used_again)
class NumbersAgain(QueueOutbox):
    """The highest that is there, and one: as SQLite does without `autoincrement`."""

    def number(self) -> int:
        return 1 + max((row.number for rows in self.rows.values() for row in rows), default=0)


@fails(B.test_an_outbox_row_of_a_user_transaction_exists_only_if_it_commits)
class OwnAtOnce(QueueOutbox):
    @contextmanager
    def own(self) -> Iterator[Callable[[str, Any], object]]:
        yield lambda statement, outgoing: self.leave("", UNOWNED, [outgoing])


@fails(B.test_outbox_rows_without_a_partition_have_one_sender_at_a_time)
class Everybody(QueueOutbox):
    def unowned_rows(self, owner: str, most: int, targets: Targets | None = None) -> list[Posted]:
        return chosen(self.rows.get(("", UNOWNED), []), targets)[:most]


@fails(B.test_outbox_rows_without_a_partition_have_one_sender_at_a_time)
class OncePerLease(QueueOutbox):
    """Who has it does not get it again."""

    def unowned_rows(self, owner: str, most: int, targets: Targets | None = None) -> list[Posted]:
        return [] if self.sender is not None else super().unowned_rows(owner, most, targets)


@fails(B.test_an_outbox_row_without_a_partition_is_deleted_when_delivered)
class KeepsStrays(QueueOutbox):
    def delivered(self, group: str, numbers: Mapping[Partition, Sequence[int]]) -> None:
        super().delivered(group or "nobody", numbers)


@fails(B.test_outbox_rows_with_and_without_a_partition_are_read_separately)
class StraysOfAll(QueueOutbox):
    def unowned_rows(self, owner: str, most: int, targets: Targets | None = None) -> list[Posted]:
        super().unowned_rows(owner, most, targets)
        return [row for rows in self.rows.values() for row in rows][:most]


@fails(B.test_an_origin_is_recorded_once_by_each_group)
class TakesAll(QueueOutbox):
    def take(self, group: str, origins: set[str]) -> None: ...


@fails(B.test_an_origin_is_recorded_once_by_each_group)
class TakesForAll(QueueOutbox):
    def take(self, group: str, origins: set[str]) -> None:
        for known in {*self.seen, group, f"{group}-other"}:
            super().take(known, origins)


@fails(B.test_an_origin_is_recorded_once_by_each_group)
class ForgetsAll(QueueOutbox):
    def forget_origins(self) -> None:
        self.seen.clear()


@fails(B.test_recorded_origins_are_rolled_back_with_their_transaction)
class TakesAtOnce(QueueOutbox):
    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[QueueOutboxTx]:
        with super().transaction(group, partition, epoch) as tx:
            try:
                yield tx
            finally:
                self.take(group, tx.taken)


@fails(B.test_an_outage_raises_store_unavailable_and_loses_no_outbox_row)
class SilentlyAway(QueueOutbox):
    def delivered(self, group: str, numbers: Mapping[Partition, Sequence[int]]) -> None:
        try:
            super().delivered(group, numbers)
        except StoreUnavailable:
            return

"""The queue store with an outbox: rows in memory, applied at the end of their transaction like everything else.

For the controls of `OutboxSuite`; see `queue_store.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kconsume._kafka.outgoing import Outgoing
from kconsume.backends.capabilities import Capabilities
from kconsume.backends.outbox.tables import ALL_TARGETS, NO_TARGETS, UNOWNED, Posted, Targets
from kconsume.records import Partition
from kconsume.testing.conformance import Subject
from tests.contract.queue_store import QueueStore, QueueTx, subject_of

Place = tuple[str, Partition]


class QueueOutboxTx(QueueTx):
    def __init__(self, store: QueueOutbox, group: str) -> None:
        super().__init__(store)
        self.posted: list[Outgoing] = []
        self.taken: set[str] = set()
        self._outbox = store
        self._group = group

    def post(self, outgoing: Sequence[Outgoing]) -> None:
        self.posted.extend(outgoing)

    def record_origins(self, origins: Sequence[str]) -> set[str]:
        new = set(origins) - self._outbox.seen.get(self._group, set()) - self.taken
        self.taken |= new
        return new


class QueueOutbox(QueueStore):
    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[Place, list[Posted]] = {}
        self.seen: dict[str, set[str]] = {}
        self.sender: str | None = None
        self.last = 0

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, outbox=self)

    @contextmanager
    def transaction(self, group: str, partition: Partition, epoch: int) -> Iterator[QueueOutboxTx]:
        with self._lock:
            self.begin(group, partition, epoch)
        tx = QueueOutboxTx(self, group)
        try:
            yield tx
            with self._lock:
                self.end(group, partition, epoch, tx)
                self.leave(group, partition, tx.posted)
                self.take(group, tx.taken)
        finally:
            tx.connection.over = True

    def leave(self, group: str, partition: Partition, outgoing: Sequence[Outgoing]) -> None:
        for each in outgoing:
            self.rows.setdefault((group, partition), []).append(Posted(self.number(), each))

    def number(self) -> int:
        self.last += 1
        return self.last

    def take(self, group: str, origins: set[str]) -> None:
        self.seen.setdefault(group, set()).update(origins)

    def posted(
        self, group: str, epochs: Mapping[Partition, int], most: int, targets: Mapping[Partition, Targets] = NO_TARGETS
    ) -> dict[Partition, list[Posted]]:
        with self._lock:
            ours = [p for p, epoch in epochs.items() if self.is_ours(group, p, epoch)]
            found = {p: chosen(self.rows.get((group, p), []), targets.get(p))[:most] for p in ours}
            return {p: rows for p, rows in found.items() if rows}

    def is_ours(self, group: str, partition: Partition, epoch: int) -> bool:
        return self._rows[group, partition].epoch == epoch

    def delivered(self, group: str, numbers: Mapping[Partition, Sequence[int]]) -> None:
        with self._lock:
            for partition, gone in numbers.items():
                kept = [row for row in self.rows.get((group, partition), []) if row.number not in gone]
                self.rows[group, partition] = kept

    def unowned_rows(self, owner: str, most: int, targets: Targets | None = None) -> list[Posted]:
        with self._lock:
            rows = self.rows.get(("", UNOWNED), [])
            if rows and self.sender is None:
                self.sender = owner
            return chosen(rows, targets)[:most] if self.sender == owner else []

    def insert_statement(self, outgoing: Outgoing) -> tuple[str, Any]:
        return "leave", outgoing

    def forget_origins(self) -> None:
        with self._lock:
            pass  # none of them is old

    @contextmanager
    def own(self) -> Iterator[Callable[[str, Any], object]]:
        """A person's transaction."""
        left: list[Outgoing] = []

        def execute(statement: str, outgoing: Outgoing) -> None:
            left.append(outgoing)

        yield execute
        self.leave("", UNOWNED, left)


def chosen(rows: Sequence[Posted], targets: Targets | None) -> list[Posted]:
    topics, others, above = targets or ALL_TARGETS
    return [row for row in rows if row.number > above and (row.outgoing.topic in topics) is not others]


def outbox_subject(store: QueueOutbox) -> Subject:
    return replace(subject_of(store), own=store.own)

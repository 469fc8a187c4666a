"""Sends the dead letters of a table back: into the outbox of the same database, and from there to Kafka.

One transaction writes the record of a letter into the outbox and marks the letter. So the letter is sent once, also if
the command is killed. The holder of the outbox's lease sends the rows: a running app that keeps its offsets there, or
this command. If the lease holder is killed before it deletes a confirmed row, the record is sent twice, but the group
handles it once.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from kconsume._kafka.outgoing import Outgoing
from kconsume._kafka.producer import RelayProducer, relay_settings
from kconsume._runtime.deadlines import Deadline
from kconsume._runtime.output.outbox_relay import OutboxRelay
from kconsume.app import App
from kconsume.backends.capabilities import OutboxStore
from kconsume.backends.dead_letters.reader import LetterReader
from kconsume.backends.dead_letters.sender import LetterSender, sender_in
from kconsume.cli.dlq.places import TablePlace
from kconsume.cli.redrive.selection import Chosen, FoundLetter, addressed
from kconsume.errors import BrokerUnavailable
from kconsume.failures.letter_headers import Letter

_PAGE = 500
_PATIENCE = 60.0
"""Seconds without a confirmation, before the command gives up."""
_POLL = 0.1


def letters_of(letters: LetterReader) -> Iterator[FoundLetter]:
    """All letters that the table holds."""
    after = 0
    while page := letters.page(after, _PAGE):
        for kept in page:
            letter = kept.letter
            yield FoundLetter(str(kept.row), letter, kept.failed_at, letter.added_headers, kept.row, kept.is_sent)
        after = page[-1].row


class TableSender:
    """Writes letters of a table into the outbox, and waits until they are sent."""

    def __init__(self, place: TablePlace, topics: Collection[str]) -> None:
        self._place = place
        self._topics = topics
        self._sender: LetterSender = sender_in(place.kept_in, place.name)
        self._sender.prepare()

    def send(self, chunk: Sequence[Chosen]) -> int:
        """Write a chunk, in one transaction. Returns how many letters: those sent by another command are left out."""
        topics = {each.found.letter.origin: each.route.topic for each in chunk}

        def outgoing(letter: Letter) -> Outgoing:
            return addressed(letter, topics[letter.origin])

        return self._sender.send_back([each.found.row for each in chunk], outgoing)

    @property
    def waiting(self) -> int:
        return self._sender.waiting(self._topics)

    @contextmanager
    def relayed(self, app: App) -> Iterator[None]:
        """Inside the block, send the rows of the outbox, if no app does. At its end, wait until all rows are sent."""
        producer = RelayProducer(relay_settings(app.declared.bootstrap_servers(), app.kafka), "kconsume-redrive")
        owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        relay = OutboxRelay(cast(OutboxStore, self._place.kept_in), "kconsume-redrive", producer, owner)
        relay.start()
        try:
            yield
            self._await_sent(app)
        finally:
            relay.close(Deadline(5.0))
            producer.close(5.0)
        self._sender.release_lease(owner)

    def _await_sent(self, app: App) -> None:
        left, deadline = self.waiting, Deadline(_PATIENCE)
        while left:
            if deadline.passed:
                raise BrokerUnavailable(
                    f"{left} records wait in the outbox of {self._place.store}, and none was confirmed for "
                    f"{_PATIENCE:g} s: check the brokers at {app.brokers}. A running app that keeps its offsets "
                    f"there sends the records, or this command when you run it again"
                )
            time.sleep(_POLL)
            now = self.waiting
            left, deadline = now, deadline if now == left else Deadline(_PATIENCE)

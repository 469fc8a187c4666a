"""Sending the dead letters of a table back: into the outbox of the same database, and from there to Kafka.

A letter is marked in the transaction that puts its record into the outbox, so it leaves once, whenever the command is
killed. What the outbox holds is sent by an app that runs with its offsets there, or by us: whoever has its lease. A
record that is sent twice, because its sender was killed before it could say so, is taken in once by the group.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from kconsume.app import App
from kconsume.backends.abc import OutboxStore
from kconsume.backends.letter_reading import LetterReader
from kconsume.backends.letter_sending import LetterSender, sender_in
from kconsume.cli.dlq_places import TablePlace
from kconsume.cli.redrive_choice import Chosen, Found, addressed
from kconsume.errors import BrokerUnavailable
from kconsume.failures.letters import Letter
from kconsume.outlet import RelayOutlet, relay_settings
from kconsume.output import Outgoing
from kconsume.runtime.budget import Deadline
from kconsume.runtime.relay import Relay

_PAGE = 500
_PATIENCE = 60.0
"""Seconds in which nothing is confirmed."""
_GLANCE = 0.1


def letters_of(letters: LetterReader) -> Iterator[Found]:
    """All that the table holds."""
    after = 0
    while page := letters.page(after, _PAGE):
        for kept in page:
            letter = kept.letter
            yield Found(str(kept.row), letter, kept.failed_at, letter.marks, kept.row, kept.is_sent)
        after = page[-1].row


class Posting:
    """Puts letters of a table into the outbox, and sees them off."""

    def __init__(self, place: TablePlace, topics: Collection[str]) -> None:
        self._place = place
        self._topics = topics
        self._sender: LetterSender = sender_in(place.kept_in, place.name)
        self._sender.prepare()

    def send(self, chunk: Sequence[Chosen]) -> int:
        """All of them, or none; how many, for another may have sent some meanwhile."""
        topics = {each.found.letter.origin: each.route.topic for each in chunk}

        def outgoing(letter: Letter) -> Outgoing:
            return addressed(letter, topics[letter.origin])

        return self._sender.send_back([each.found.row for each in chunk], outgoing)

    @property
    def waiting(self) -> int:
        return self._sender.waiting(self._topics)

    @contextmanager
    def relayed(self, app: App) -> Iterator[None]:
        """Send what is in the outbox meanwhile, if nobody else does; all that goes to our topics, before it ends."""
        outlet = RelayOutlet(relay_settings(app._address(), app.kafka), "kconsume-redrive")
        owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        relay = Relay(cast(OutboxStore, self._place.kept_in), "kconsume-redrive", outlet, owner)
        relay.start()
        try:
            yield
            self._see_off(app)
        finally:
            relay.close(Deadline(5.0))
            outlet.close(5.0)
        self._sender.let_go(owner)

    def _see_off(self, app: App) -> None:
        left, deadline = self.waiting, Deadline(_PATIENCE)
        while left:
            if deadline.passed:
                raise BrokerUnavailable(
                    f"{left} records wait in the outbox of {self._place.store}, and none was confirmed for "
                    f"{_PATIENCE:g} s: check the brokers at {app.brokers}; they are sent by an app that runs with its "
                    f"offsets there, or by running this again"
                )
            time.sleep(_GLANCE)
            now = self.waiting
            left, deadline = now, deadline if now == left else Deadline(_PATIENCE)

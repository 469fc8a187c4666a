"""What an offset store is, as tests: every store passes the suite of its level, ours and anybody else's.

    OffsetsSuite                 keeps offsets
    └── FencedSuite              … and knows who owns a partition
        └── TransactionalSuite   … and shares a transaction with handlers
            └── OutboxSuite      … and keeps in it what they send

A store's author subclasses one of them as a `Test…` class and gives it a fixture `subject`. The suites know nothing of
any store: what they need of one is in `Subject`. They need pytest, which nothing else of `kconsume.testing` does.
"""

import pytest

# Before they are imported: an assertion that fails should say with which values, here as in a test file.
pytest.register_assert_rewrite(
    "kconsume.testing.conformance.bench",
    "kconsume.testing.conformance.claim_order",
    "kconsume.testing.conformance.fenced",
    "kconsume.testing.conformance.fencing_races",
    "kconsume.testing.conformance.offsets",
    "kconsume.testing.conformance.outbox",
    "kconsume.testing.conformance.transactional",
    "kconsume.testing.conformance.zombies",
)

from kconsume.testing.conformance.asynchronous import awaited  # noqa: E402
from kconsume.testing.conformance.bench import Bench, Owner  # noqa: E402
from kconsume.testing.conformance.fenced import FencedSuite  # noqa: E402
from kconsume.testing.conformance.forms import pipelined  # noqa: E402
from kconsume.testing.conformance.offsets import OffsetsSuite  # noqa: E402
from kconsume.testing.conformance.outbox import OutboxSuite  # noqa: E402
from kconsume.testing.conformance.subject import Subject  # noqa: E402
from kconsume.testing.conformance.transactional import TransactionalSuite  # noqa: E402

__all__ = [
    "Bench",
    "FencedSuite",
    "OffsetsSuite",
    "OutboxSuite",
    "Owner",
    "Subject",
    "TransactionalSuite",
    "awaited",
    "pipelined",
]

"""The contract of an offset store, as test suites. Every store must pass the suite of its level: the stores of
kconsume, and third-party stores.

    OffsetsSuite                 keeps offsets
    └── FencedSuite              and records who owns a partition
        └── TransactionalSuite   and shares a transaction with handlers
            └── OutboxSuite      and stores in it the records that handlers send

The author of a store subclasses one of the suites as a `Test…` class, with a fixture `subject`. The fixture returns a
`Subject`, which describes the store. The suites need pytest, which no other part of `kconsume.testing` needs.
"""

import pytest

# Must run before these modules are imported, so that a failed assertion shows its values, as in a test file.
pytest.register_assert_rewrite(
    "kconsume.testing.conformance.harness",
    "kconsume.testing.conformance.claim_order",
    "kconsume.testing.conformance.fenced",
    "kconsume.testing.conformance.fencing_races",
    "kconsume.testing.conformance.offsets",
    "kconsume.testing.conformance.outbox",
    "kconsume.testing.conformance.transactional",
    "kconsume.testing.conformance.zombies",
)

from kconsume.testing.conformance.async_driver import awaited  # noqa: E402
from kconsume.testing.conformance.fenced import FencedSuite  # noqa: E402
from kconsume.testing.conformance.forms import pipelined  # noqa: E402
from kconsume.testing.conformance.harness import Bench, Owner  # noqa: E402
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

"""`python -m kconsume.testing.services`: fetch now what the tests would otherwise fetch on first use.

A download in the middle of a test would count against that test's time limit.
"""

from __future__ import annotations

import sys

from kconsume.errors import ServiceUnavailable
from kconsume.testing.services.kafka import prepare_kafka

if __name__ == "__main__":
    try:
        prepare_kafka()
    except ServiceUnavailable as missing:
        sys.exit(str(missing))

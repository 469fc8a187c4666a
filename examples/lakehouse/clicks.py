"""The type of a click, and the addresses of Kafka, the database and the folder.

`STAGE` is the prefix of the topic and of every group, so that several runs can share a cluster.
"""

from __future__ import annotations

import os
from datetime import datetime

import msgspec

STAGE = os.environ.get("STAGE", "")
BROKERS = os.environ.get("BROKERS", "localhost:9092")
LAKE = os.environ.get("LAKE", "lake")
WAREHOUSE = os.environ.get("WAREHOUSE", "postgresql://localhost/warehouse")
CHECKPOINT = os.environ.get("CHECKPOINT", "checkpoint")

CLICKS = f"{STAGE}clicks"


class Click(msgspec.Struct, frozen=True):
    id: int
    visitor: str
    page: str
    at: datetime
    milliseconds: int
    """The response time of the page."""

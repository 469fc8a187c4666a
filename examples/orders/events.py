"""The events between the three services, their topics, and the addresses of the services.

`STAGE` is the prefix of every topic and group, so that several runs can share a cluster.
"""

from __future__ import annotations

import os

import msgspec

STAGE = os.environ.get("STAGE", "")
SHOP = os.environ.get("SHOP", "postgresql://localhost/shop")
OFFICE = os.environ.get("OFFICE", "http://127.0.0.1:8025")

ORDERS = f"{STAGE}orders"
RESERVATIONS = f"{STAGE}reservations"


class Placed(msgspec.Struct, tag=True, frozen=True):
    number: int
    sku: str
    quantity: int


class Cancelled(msgspec.Struct, tag=True, frozen=True):
    number: int


class Reserved(msgspec.Struct, tag=True, frozen=True):
    number: int


class Released(msgspec.Struct, tag=True, frozen=True):
    number: int

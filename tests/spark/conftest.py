"""What the Spark tests share: a shop with a topic and a database of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import pytest

from kconsume.testing.services import KafkaService
from tests.fix_kafka import MakeTopic
from tests.spark.shop import Shop


class OpenShop(Protocol):
    def __call__(self, partitions: int = 3) -> Shop: ...


@pytest.fixture
def open_shop(kafka: KafkaService, topic: MakeTopic, postgres_url: str, tmp_path: Path) -> OpenShop:
    def make(partitions: int = 3) -> Shop:
        return Shop(kafka.bootstrap, topic(partitions), postgres_url, tmp_path, partitions)

    return make


@pytest.fixture
def shop(open_shop: OpenShop) -> Shop:
    return open_shop()

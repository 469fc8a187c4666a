"""Members that join and leave every other moment: nothing is lost or done twice, and no partition is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from kconsume.testing.services import KafkaService
from tests.chaos.effects import EffectsOf
from tests.chaos.fleet import REPOSITORY
from tests.chaos.form import TIMEOUT, form, printed_seed
from tests.chaos.storm import PARTITIONS
from tests.fix_kafka import MakeTopic

pytestmark = pytest.mark.timeout(TIMEOUT + 120)

SECONDS = form(short=6.0, long=60.0)
PROTOCOLS = ["cooperative", "eager", "consumer"]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_a_storm_of_rebalances_loses_nothing_and_repeats_nothing(
    kafka: KafkaService, topic: MakeTopic, group: str, effects_of: EffectsOf, store: str, protocol: str
) -> None:
    effects = effects_of(store)
    seen = storm(kafka, topic(PARTITIONS), group, effects.offsets, protocol)
    assert (effects.rows, effects.distinct) == (seen["produced"], seen["produced"]), "rows = distinct = produced"
    assert seen["pauses"] > 0, "there was no back-pressure, so it was not proven under any"
    assert seen["joins"] >= form(short=3, long=20)


def test_without_the_fence_and_with_nobody_who_stops_the_same_storm_repeats_records(
    kafka: KafkaService, topic: MakeTopic, group: str, effects_of: EffectsOf
) -> None:
    effects = effects_of("postgres")
    storm(kafka, topic(PARTITIONS), group, effects.offsets, "cooperative", "--no-fence")
    assert effects.rows > effects.distinct


def storm(kafka: KafkaService, topic: str, group: str, offsets: str, protocol: str, *flags: str) -> dict[str, Any]:
    """In a process of its own; what it says in its last line."""
    told = {"brokers": kafka.bootstrap, "topic": topic, "group": group, "offsets": offsets, "protocol": protocol}
    told |= {"seconds": str(SECONDS), "seed": str(printed_seed().randrange(2**32))}
    command = [sys.executable, "-m", "tests.chaos.storm", *(f"--{key}={value}" for key, value in told.items()), *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=TIMEOUT + 100, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stdout)  # noqa: T201  (shown when the test fails)
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen

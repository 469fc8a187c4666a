"""A program on confluent-kafka that prints when it has its first message. Started by `cases/start.py`.

Must not import kconsume. The client settings are arguments of the command.
"""

from __future__ import annotations

import sys
import time

from confluent_kafka import Consumer


def main(topic: str, *settings: str) -> None:
    consumer = Consumer(dict(setting.split("=", 1) for setting in settings))
    consumer.subscribe([topic])
    while (message := consumer.poll(0.1)) is None or message.error():
        continue
    message.value()
    print(time.monotonic(), time.process_time(), flush=True)
    consumer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

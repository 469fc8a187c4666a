"""A kconsume program that prints when its handler is first called. Started by `cases/start.py`."""

from __future__ import annotations

import sys
import time

from kconsume import App

bootstrap, group, topic = sys.argv[1:]
app = App(bootstrap, group=group)


@app.consume(topic)
def say(value: bytes) -> None:  # noqa: ARG001  (its content does not matter)
    print(time.monotonic(), time.process_time(), flush=True)
    app.stop()


if __name__ == "__main__":
    app.run()

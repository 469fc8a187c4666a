"""The samples of docs/spark.md are handlers as they stand; what handlers do on a real Spark is in `tests/spark`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kconsume import App
from kconsume.spark import ForeachBatch

PAGE = (Path(__file__).parents[3] / "docs" / "spark.md").read_text()


def test_the_samples_are_handlers_as_they_stand() -> None:
    scope: dict[str, Any] = {"__name__": "shown"}
    apps: list[App] = []
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(code, "docs/spark.md", "exec"), scope)
        if scope.get("app") not in (None, *apps):
            apps.append(scope["app"])
    topics = [[registration.topics for registration in app.registrations] for app in apps]
    assert topics == [[("clicks",)], [("clicks",), ("views",)], [("orders",)]]
    assert isinstance(scope["batches"], ForeachBatch)

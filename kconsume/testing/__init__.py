"""What people test their handlers with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kconsume.lazy import lazily

if TYPE_CHECKING:
    from kconsume.testing.embedded import EmbeddedKafka
    from kconsume.testing.feeding import Fed, afeed, feed
    from kconsume.testing.overriding import override

__all__ = ["EmbeddedKafka", "Fed", "afeed", "feed", "override"]

_HOMES = {
    "EmbeddedKafka": "embedded",
    "Fed": "feeding",
    "afeed": "feeding",
    "feed": "feeding",
    "override": "overriding",
}

__getattr__, __dir__ = lazily(__name__, _HOMES, globals())

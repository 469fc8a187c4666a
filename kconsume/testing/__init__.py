"""Tools for users who test their handlers: `feed`, `override`, `EmbeddedKafka`, and a pytest plugin with fixtures.

Importing this package imports nothing else: each name is looked up when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kconsume._lazy import lazily

if TYPE_CHECKING:
    from kconsume._embedded.mock_cluster import EmbeddedKafka
    from kconsume.testing._feed import Fed, afeed, feed
    from kconsume.testing._override import override

__all__ = ["EmbeddedKafka", "Fed", "afeed", "feed", "override"]

_MODULES = {
    "EmbeddedKafka": "kconsume._embedded.mock_cluster",
    "Fed": "kconsume.testing._feed",
    "afeed": "kconsume.testing._feed",
    "feed": "kconsume.testing._feed",
    "override": "kconsume.testing._override",
}

__getattr__, __dir__ = lazily(__name__, _MODULES, globals())

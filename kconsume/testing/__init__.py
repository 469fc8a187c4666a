"""What people test their handlers with."""

from kconsume.testing.embedded import EmbeddedKafka

__all__ = ["EmbeddedKafka"]

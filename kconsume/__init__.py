"""kconsume: decorate a function, get a production Kafka consumer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kconsume._lazy import lazily

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kconsume._handlers.batches import Batch, Batching
    from kconsume._handlers.rate import Rate
    from kconsume._kafka.outgoing import Outgoing, Sender
    from kconsume._runtime.supervisor import Report
    from kconsume.app import App
    from kconsume.errors import BatchError, ConfigurationError, DecodeError, Fenced, HandlerFailed, KconsumeError
    from kconsume.failures.dead_letter import DeadLetter
    from kconsume.failures.retry import Retry
    from kconsume.failures.retry_topics import RetryTopics
    from kconsume.records import Partition, Record
    from kconsume.router import Router

__all__ = [
    "App",
    "Batch",
    "BatchError",
    "Batching",
    "ConfigurationError",
    "DeadLetter",
    "DecodeError",
    "Fenced",
    "HandlerFailed",
    "KconsumeError",
    "Outgoing",
    "Partition",
    "Rate",
    "Record",
    "Report",
    "Retry",
    "RetryTopics",
    "Router",
    "Sender",
    "__version__",
]

_MODULES = {
    "App": "kconsume.app",
    "Batch": "kconsume._handlers.batches",
    "BatchError": "kconsume.errors",
    "Batching": "kconsume._handlers.batches",
    "ConfigurationError": "kconsume.errors",
    "DeadLetter": "kconsume.failures.dead_letter",
    "DecodeError": "kconsume.errors",
    "Fenced": "kconsume.errors",
    "HandlerFailed": "kconsume.errors",
    "KconsumeError": "kconsume.errors",
    "Outgoing": "kconsume._kafka.outgoing",
    "Partition": "kconsume.records",
    "Rate": "kconsume._handlers.rate",
    "Record": "kconsume.records",
    "Report": "kconsume._runtime.supervisor",
    "Retry": "kconsume.failures.retry",
    "RetryTopics": "kconsume.failures.retry_topics",
    "Router": "kconsume.router",
    "Sender": "kconsume._kafka.outgoing",
}

__getattr__, __dir__ = lazily(__name__, _MODULES, globals())

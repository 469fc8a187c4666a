"""kconsume: decorate a function, get a production Kafka consumer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kconsume.lazy import lazily

__version__ = "0.1.0"

if TYPE_CHECKING:
    from kconsume.app import App
    from kconsume.batches import Batch, Batching
    from kconsume.errors import BatchError, ConfigurationError, DecodeError, Fenced, HandlerFailed, KconsumeError
    from kconsume.failures.dead_letter import DeadLetter
    from kconsume.failures.retry import Retry
    from kconsume.failures.retry_topics import RetryTopics
    from kconsume.output import Outgoing, Sender
    from kconsume.rate import Rate
    from kconsume.records import Partition, Record
    from kconsume.router import Router
    from kconsume.runtime.supervisor import Report

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

_HOMES = {
    "App": "app",
    "Batch": "batches",
    "BatchError": "errors",
    "Batching": "batches",
    "ConfigurationError": "errors",
    "DeadLetter": "failures.dead_letter",
    "DecodeError": "errors",
    "Fenced": "errors",
    "HandlerFailed": "errors",
    "KconsumeError": "errors",
    "Outgoing": "output",
    "Partition": "records",
    "Rate": "rate",
    "Record": "records",
    "Report": "runtime.supervisor",
    "Retry": "failures.retry",
    "RetryTopics": "failures.retry_topics",
    "Router": "router",
    "Sender": "output",
}

__getattr__, __dir__ = lazily(__name__, _HOMES, globals())

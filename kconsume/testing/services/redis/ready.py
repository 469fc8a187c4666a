"""Ask a Redis whether it is ready."""

from __future__ import annotations

from kconsume.errors import ServiceUnavailable

_ANSWER_SECONDS = 2


def answers(url: str) -> str | None:
    """Return None if a ping is answered, else the reason why it is not. As `ready.Answers`."""
    try:
        import redis
    except ImportError as missing:
        raise ServiceUnavailable(
            "A Redis for tests needs its client, which is not installed; run `pip install 'kconsume[redis]'`."
        ) from missing
    client = redis.Redis.from_url(url, socket_timeout=_ANSWER_SECONDS, socket_connect_timeout=_ANSWER_SECONDS)
    try:
        client.ping()
    except redis.RedisError as refused:  # also raised while the server still loads its data
        return str(refused)
    finally:
        client.close()
    return None

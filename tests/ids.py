"""Names for cases that are objects: short, and the same in every process, or the tests could not be shared out."""

from __future__ import annotations

import re


def short(given: object) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", str(given))[:40]

"""What every test may use. Fixtures live in `fix_….py` files, one for each service."""

from __future__ import annotations

import sys
from pathlib import Path

# The importlib import mode puts nothing on the path; the plugins and helpers are modules of `tests`.
sys.path.insert(0, str(Path(__file__).parent.parent))

pytest_plugins = ["tests.fix_kafka", "tests.fix_arena"]

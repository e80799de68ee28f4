"""Makes the benchmarks' modules importable by the names under which they import one another."""

import sys
from pathlib import Path

from tests.sharding.conftest import compiled_programs  # noqa: F401  a fixture that applies here, too

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))

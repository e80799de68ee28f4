"""Make the benchmarks' modules importable by the bare names that they use themselves."""

import sys
from pathlib import Path

from tests.sharding.conftest import compiled_programs  # noqa: F401  the fixture applies here, too

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
if str(BENCHMARKS) not in sys.path:
    sys.path.append(str(BENCHMARKS))

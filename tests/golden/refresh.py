"""Plans the benchmark's cases again and stores the golden plans; `git diff` shows what has changed.

    python -m tests.golden.refresh [CASE ...] [--keep-variant]

With `--keep-variant`, only the stored variant is planned, without a search for the best variant.
"""

from __future__ import annotations

import argparse
import time
import warnings

from autoshard.errors import AutoshardWarning
from tests.golden.golden import CASES, FOLDER, best_variant, planned, stored, summary, text, variant_rows


def refresh(name: str, keep_variant: bool) -> str:
    """Writes the golden plan of a case and returns the chosen strategy and variant."""
    if keep_variant:
        before = stored(name)
        variant, rows = before["variant"], before["variants"]
    else:
        variant, rows = best_variant(name), variant_rows(name)
    plan = planned(name, *variant)
    (FOLDER / f"{name}.json").write_text(text(summary(plan, variant) | {"variants": rows}))
    return f"{plan.chosen}, {variant[0]}, {variant[1]}"


def main() -> None:
    """Refreshes the requested cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="default: all")
    parser.add_argument("--keep-variant", action="store_true", help="plan only the stored variant")
    options = parser.parse_args()
    warnings.simplefilter("ignore", AutoshardWarning)  # for variants that do not fit
    for name in options.cases or CASES:
        start = time.perf_counter()
        print(f"{name}: {refresh(name, options.keep_variant)} ({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()

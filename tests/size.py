"""Print the package's lines of code by folder, and fail when there are more than the plan of the house allows."""

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALL, HALF, LIMIT = "all", ("diagnosis", "observe"), 6000


def count() -> Counter[str]:
    """Return the number of lines of each folder of the package, and of all together."""
    lines: Counter[str] = Counter()
    for path in sorted((ROOT / "dxdy_nb").rglob("*.py")):
        inside = path.relative_to(ROOT / "dxdy_nb").parts
        number = len(path.read_text().splitlines())
        lines[inside[0] if len(inside) > 1 else "(top)"] += number
        lines[ALL] += number
    return lines


if __name__ == "__main__":
    lines = count()
    print("\n".join(f"{number:6d}  {folder}" for folder, number in sorted(lines.items())))
    half = sum(lines[folder] for folder in HALF)
    if lines[ALL] > LIMIT or half > LIMIT // 2:
        sys.exit(f"{lines[ALL]} lines, {half} of them in {' and '.join(HALF)}; allowed are {LIMIT} and {LIMIT // 2}.")

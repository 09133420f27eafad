"""Make the traces of examples/traces again: the same bytes each time.

    bench/make_traces.py [FOLDER]

day-curve               a day with a morning rise, a lunch dip, an evening peak and a quiet night
step-burst              three times the load within a minute, for twenty minutes, and back
prompt-to-output-heavy  the same number of requests, from long prompts with short answers to the
reverse
"""

import csv
import math
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "examples" / "traces"
HEADER = ("seconds", "requests_per_second", "input_tokens", "output_tokens")
SEED = 20  # any number, as long as it stays

Row = tuple[int, float, int, int]


def day_curve() -> Iterator[Row]:
    """A row each 5 minutes: 4 to about 30 requests per second, of 1500 and 500 tokens."""
    noise = random.Random(SEED)
    for minute in range(0, 24 * 60, 5):
        hour = minute / 60.0
        day = _bump(hour, 10.5, 2.2) + 0.85 * _bump(hour, 15.0, 2.0) + 1.15 * _bump(hour, 20.5, 1.6)
        yield minute * 60, round((4.0 + 22.0 * day) * noise.uniform(0.95, 1.05), 2), 1500, 500


def step_burst() -> Iterator[Row]:
    """A row each minute: 8 requests per second, from minute 30 on 24 of them, from minute 50 on 8
    again.
    """
    noise = random.Random(SEED)
    for minute in range(120):
        rate = 24.0 if 30 <= minute < 50 else 8.0
        yield minute * 60, round(rate * noise.uniform(0.97, 1.03), 2), 1500, 500


def prompt_to_output_heavy() -> Iterator[Row]:
    """A row each minute: 10 requests per second; within an hour from 4000 and 150 tokens to 500 and
    1500.
    """
    noise = random.Random(SEED)
    for minute in range(180):
        shift = min(1.0, max(0.0, (minute - 60) / 60.0))
        rate = round(10.0 * noise.uniform(0.97, 1.03), 2)
        yield minute * 60, rate, round(4000 - 3500 * shift), round(150 + 1350 * shift)


TRACES: dict[str, Callable[[], Iterator[Row]]] = {
    "day-curve": day_curve,
    "step-burst": step_burst,
    "prompt-to-output-heavy": prompt_to_output_heavy,
}


def _bump(hour: float, center: float, width: float) -> float:
    return math.exp(-(((hour - center) / width) ** 2))


def main(arguments: list[str]) -> int:
    """Write every trace into the folder; returns the exit status."""
    folder = Path(arguments[0]) if arguments else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in TRACES.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(HEADER)
            writer.writerows(rows())
    print(f"{len(TRACES)} traces in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

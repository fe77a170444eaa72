"""`python -m scripts.tests.collapse_measured RUNS` prints how often the collapse alarm rings in so many healthy runs.

They have 500 steps. Then how often and when it finds each kind of collapse in as many others.
"""

import random
import statistics
import sys

from dc_trl.callbacks.collapse import SIGNALS
from tests.collapse_curves import alarms_in, collapse, healthy_run


def report(runs):
    false = [alarm for seed in range(runs) for alarm in alarms_in(healthy_run(seed))]
    counts = {signal: sum(alarm.signal == signal for alarm in false) for signal in SIGNALS}
    print(f"{runs} healthy runs of 500 steps: {len(false)} alarms, {counts}")
    for signal in ("reward", "mismatch"):
        for length in (1, 20, 100):
            delays, sound, others = [], [], 0
            for seed in range(runs):
                onset = random.Random(seed).randint(100, 350)
                rows = healthy_run(seed)
                rung = {a.signal: a for a in alarms_in(collapse(rows, signal, onset, length, seed))}
                others += any(name != signal for name in rung)
                if signal in rung:
                    delays.append(rung[signal].step - onset)
                    sound.append(rung[signal].sound_until - onset)
            print(
                f"{signal}, within {length} steps: found {len(delays) / runs:.1%}, median {statistics.median(delays)} "
                f"and at most {max(delays)} steps after the onset; sound until {statistics.median(sound)} (at most "
                f"{max(sound)}) steps after it; another signal in {others}"
            )


if __name__ == "__main__":
    report(int(sys.argv[1]))

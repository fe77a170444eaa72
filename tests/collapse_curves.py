"""Synthetic runs, healthy ones and ones that collapse."""

import math
import random

from dc_trl.callbacks.collapse import CollapseMonitor


def healthy_run(seed, steps=500):
    """Logs of a random run in which nothing goes wrong, as rough as real ones.

    Learning and stagnating rewards with the noise of a batch and slow wandering; gradient norms and mismatch that
    scatter log-normally by 20 to 50 %, drift up to the 3-fold, and spike up to the 50-fold; entropy that falls to as
    little as a fifth, or rises to the double; missing and NaN values.
    """
    rng = random.Random(seed)
    start = rng.uniform(0, 0.6)
    gain = rng.choice([0, 1]) * rng.uniform(0, 0.95 - start)
    pace, reward_noise, wander = rng.uniform(30, 400), rng.uniform(0.01, 0.08), 0.0
    norm, norm_noise, norm_drift = rng.uniform(0.03, 0.6), rng.uniform(0.2, 0.5), math.log(rng.uniform(1 / 3, 3))
    gap, gap_noise, gap_drift = rng.uniform(5e-4, 2e-2), rng.uniform(0.2, 0.4), math.log(rng.uniform(1 / 3, 3))
    entropy, entropy_drift = rng.uniform(0.1, 0.8), math.log(rng.uniform(0.2, 2))
    unanimous = rng.uniform(0, 0.5)
    rows = []
    for step in range(1, steps + 1):
        done = step / steps
        wander = 0.95 * wander + rng.gauss(0, 0.005)
        learned = start + gain * (1 - math.exp(-step / pace)) + wander
        row = {
            "reward": min(max(rng.gauss(learned, reward_noise), 0.0), 1.0),
            "grad_norm": norm * math.exp(norm_drift * done + rng.gauss(0, norm_noise)),
            "discrepancy/mean": gap * math.exp(gap_drift * done + rng.gauss(0, gap_noise)),
            "discrepancy/log_ppl_abs_diff": 2 * gap * math.exp(gap_drift * done + rng.gauss(0, gap_noise)),
            "entropy": entropy * math.exp(entropy_drift * done + rng.gauss(0, 0.1)),
            "lagrangian/lambda": min(0.1 + 0.9 * done * rng.random(), 1.0),
            "frac_reward_zero_std": min(max(rng.gauss(unanimous + 0.4 * done, 0.1), 0.0), 1.0),
        }
        for metric in ("grad_norm", "discrepancy/mean", "discrepancy/log_ppl_abs_diff"):
            if rng.random() < 0.02:
                row[metric] *= rng.uniform(2, 50)
        for metric in row:
            if metric != "grad_norm" and rng.random() < 0.01:
                row[metric] = rng.choice([None, math.nan])
        rows.append(row)
    return rows


def collapse(rows, signal, onset, length, seed):
    """Lets a healthy run collapse: from step `onset` on, within `length` steps."""
    rng = random.Random(-seed)
    metrics, factor = {
        "reward": (["reward"], rng.uniform(0, 0.4)),
        "mismatch": (["discrepancy/mean", "discrepancy/log_ppl_abs_diff"], rng.uniform(15, 50)),
    }[signal]
    for step in range(onset, len(rows) + 1):
        share = min(1.0, (step - onset + 1) / length)
        for metric in metrics:
            if rows[step - 1][metric] is not None:
                rows[step - 1][metric] *= factor**share if signal != "reward" else 1 + share * (factor - 1)
    return rows


def alarms_in(rows, **options):
    monitor = CollapseMonitor(**{"lambda_max": 1.0} | options)
    return [alarm for step, row in enumerate(rows, 1) for alarm in monitor.update(step, row)]

"""Trains a policy with DC-GRPO.

    accelerate launch scripts/train.py --config configs/quickstart.yaml [--any_field value ...]

Every field of the configuration file can be overridden on the command line; `--help` lists them all.
"""

import sys

from dc_trl.training.command import train


def main() -> None:
    outcome = train()
    if outcome is not None:
        sys.exit(outcome)


if __name__ == "__main__":
    main()

"""`dc-trl evaluate` from a clone; dc_trl/command/evaluate.py says what it does."""

from dc_trl.command import call


def main() -> None:
    call("evaluate")


if __name__ == "__main__":
    main()

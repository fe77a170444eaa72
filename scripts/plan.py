"""`dc-trl plan` from a clone; dc_trl/command/plan.py says what it does."""

from dc_trl.command import call


def main() -> None:
    call("plan")


if __name__ == "__main__":
    main()

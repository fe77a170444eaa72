"""`dc-trl push` from a clone; dc_trl/command/push.py says what it does."""

from dc_trl.command import call


def main() -> None:
    call("push")


if __name__ == "__main__":
    main()

"""`dc-trl train` from a clone; dc_trl/command/train.py says what it does."""

from dc_trl.command import call


def main() -> None:
    call("train")


if __name__ == "__main__":
    main()

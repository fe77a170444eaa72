"""`dc-trl study` from a clone; dc_trl/command/study.py says what it does."""

from dc_trl.command import call


def main() -> None:
    call("study")


if __name__ == "__main__":
    main()

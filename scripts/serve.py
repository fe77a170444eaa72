"""`dc-trl serve` from a clone; dc_trl/command/serve.py says what it does."""

from dc_trl.command import call


def main() -> None:
    call("serve")


if __name__ == "__main__":
    main()

"""The entry point of the console script `logitclip`, and of `python -m logitclip`."""


def main() -> None:
    """Run the command line. Ctrl-C while it is imported prints no traceback."""
    try:
        from logitclip import cli

        cli.main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()

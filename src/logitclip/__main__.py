"""The entry point of the console script `logitclip`, and of `python -m logitclip`."""

import signal
import sys
import threading
from typing import Any


def main() -> None:
    """Run the command line. Ctrl-C while it is imported prints no traceback."""
    sys.unraisablehook = _interrupt_again
    try:
        from logitclip import cli

        cli.main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        sys.unraisablehook = sys.__unraisablehook__


def _interrupt_again(dropped: Any) -> None:
    """Repeat a Ctrl-C or SIGTERM that Python has dropped.

    It drops what is raised in a destructor or in a callback of a weak reference, and imports have such callbacks.
    """
    number = signal.SIGINT
    terminated = dropped.exc_type is SystemExit and dropped.exc_value.code == 128 + signal.SIGTERM
    if terminated:
        from logitclip.cli.training import stop_on_sigterm

        stop_on_sigterm()  # after the first signal its handler is gone
        number = signal.SIGTERM
    if not (terminated or dropped.exc_type is KeyboardInterrupt) or not hasattr(signal, "pthread_kill"):
        sys.__unraisablehook__(dropped)
        return
    again = threading.Timer(0.01, signal.pthread_kill, (threading.main_thread().ident, number))
    again.daemon = True
    again.start()


if __name__ == "__main__":
    main()

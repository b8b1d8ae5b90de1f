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
    """Repeat a Ctrl-C that Python has dropped.

    It drops what is raised in a destructor or in a callback of a weak reference, and imports have such callbacks.
    """
    if dropped.exc_type is not KeyboardInterrupt or not hasattr(signal, "pthread_kill"):
        sys.__unraisablehook__(dropped)
        return
    again = threading.Timer(0.01, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    again.daemon = True
    again.start()


if __name__ == "__main__":
    main()

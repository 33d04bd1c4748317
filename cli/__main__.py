"""The start of `mycli`, `python -m mycli` and `python -m mycli.cli`."""

import os
import signal


def end_on_signals() -> None:
    """End the process silently on Ctrl-C, SIGTERM or SIGHUP, until `command` installs handlers that clean up.

    Importing the command takes 0.2 s, on a slow disk seconds, and KeyboardInterrupt would print a traceback. The
    default action would be ignored by process 1 of a container.
    """
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}  # ExitCode is not imported yet
    for number, code in codes.items():
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP, `&` in a script SIGINT
            signal.signal(number, lambda *_, code=code: os._exit(code))


def start_program() -> None:
    """Run the command line; the entry point of the `mycli` script."""
    end_on_signals()
    from mycli.cli.main import main

    main()


if __name__ == "__main__":
    start_program()

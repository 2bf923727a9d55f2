"""Ctrl-C and SIGTERM, which clusters send before they take a machine back: both stop a command in the same way."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INTERRUPTED, TERMINATED = 130, 143
"""The exit codes after Ctrl-C and after SIGTERM."""


class StopSignal:
    """Turns SIGINT and SIGTERM into KeyboardInterrupt, and remembers that one came."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._handles = False

    @property
    def exit_code(self) -> int:
        """The exit code of a command that was stopped."""
        return TERMINATED if self.received == signal.SIGTERM else INTERRUPTED

    @property
    def prefix(self) -> str:
        """What precedes the sentence that says where a command stopped."""
        return "SIGTERM: " if self.received == signal.SIGTERM else ""

    def check(self) -> None:
        """Raise the exception again: Python drops one that is raised in a clean-up function or a callback."""
        if self.received is not None:
            raise KeyboardInterrupt

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Raise KeyboardInterrupt in the main thread when a signal comes.

        A second SIGTERM does not disturb the last writes. Ctrl-C stays ignored where the shell ignores it, as for jobs
        in the background. Python reports exceptions that it drops; that of a signal is remembered and not reported.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(number: int, _: Any) -> None:
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_IGN)
            self.received = number
            raise KeyboardInterrupt

        def report_others(dropped: Any) -> None:
            if not issubclass(dropped.exc_type, KeyboardInterrupt):
                report(dropped)

        report, sys.unraisablehook = sys.unraisablehook, report_others
        numbers = [x for x in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(x) is not signal.SIG_IGN]
        before, self._handles = {number: signal.signal(number, stop) for number in numbers}, True
        try:
            yield
        finally:
            self._handles, sys.unraisablehook = False, report
            for number, handler in before.items():
                signal.signal(number, handler)

    def reset_in_forked_processes(self) -> None:
        """Let processes that are forked meanwhile, such as those of environments, end by signals as usual.

        The signals are blocked until the forked process has no handler any more, since Python drops what comes earlier.
        """
        if sys.platform != "win32":  # which forks no processes
            block, unblock = signal.SIG_BLOCK, signal.SIG_UNBLOCK

            def mask(how: int) -> None:
                if self._handles:
                    signal.pthread_sigmask(how, {signal.SIGINT, signal.SIGTERM})

            def reset() -> None:
                if self._handles:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                        signal.signal(signal.SIGINT, signal.default_int_handler)
                mask(unblock)

            os.register_at_fork(before=lambda: mask(block), after_in_parent=lambda: mask(unblock), after_in_child=reset)


STOP = StopSignal()
"""The signal of this process."""
STOP.reset_in_forked_processes()

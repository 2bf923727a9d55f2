"""`python -m perfedrl.federation.die_with_parent PID COMMAND ...`: run a command that ends when its parent PID ends.

On systems other than Linux the command runs without this link. Imports nothing but the standard library.
"""

import ctypes
import os
import signal
import sys

SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG; the setting survives exec."""


def main(parent: int, command: list[str]) -> None:
    """Replace this process by the command."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:  # the parent ended before the signal was set
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

"""`python -m perfedrl.federation.tether COMMAND ...`: become a command that ends when the process that started it does.

Only Linux can do that; elsewhere it simply becomes the command. Nothing is loaded for it.
"""

import ctypes
import os
import signal
import sys

SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG, which survives exec."""


def main(command: list[str]) -> None:
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before this could be set
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])

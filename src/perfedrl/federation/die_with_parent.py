"""`python -m perfedrl.federation.die_with_parent PID COMMAND ...`: become a command that ends when its parent PID does.

Only Linux can do that; elsewhere it simply becomes the command. Nothing is loaded for it.
"""

import ctypes
import os
import signal
import sys

SET_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG, which survives exec."""


def main(parent: int, command: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before this could be set
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

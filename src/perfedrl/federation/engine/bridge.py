"""NVFlare's executor on an agent's machine: relays tasks to the agent's daemon.

It imports neither JAX nor the environment: when NVFlare's client process dies, the whole job ends, so it does as little
as possible.
"""

import os

from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from perfedrl.errors import UserError
from perfedrl.federation.agent.daemon_client import call_raw
from perfedrl.federation.frames import LIMIT

FRAME, REASON, TASKS = "frame", "reason", ("describe", "prepare", "update", "evaluate", "personalize")
SOCKET = "PERFEDRL_AGENT_SOCKET"
"""The environment variable with the path of the daemon's socket."""


class AgentBridge(Executor):
    """Relays a task's bytes to the daemon, and the daemon's bytes to the server, without decoding them.

    If the daemon is dead, restarting or silent for `seconds`, the agent fails in that round only.
    """

    def __init__(self, seconds: float = 600.0):
        super().__init__()
        self.seconds = float(seconds)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Relay one task; errors become replies, since an exception could end the job for all agents."""
        try:
            if task_name not in TASKS or not isinstance(shareable.get(FRAME), bytes):
                return _failure(f"the bridge does not know this task; expected one of {', '.join(TASKS)} with a frame")
            if not os.environ.get(SOCKET):
                return _failure(f"{SOCKET} is not set; start the bridge with `perfedrl federation join`")
            answer = call_raw(os.environ[SOCKET], shareable[FRAME], self.seconds, LIMIT)
        except UserError as error:
            self.log_error(fl_ctx, str(error))
            return _failure(str(error))
        reply = make_reply(ReturnCode.OK)
        reply[FRAME] = answer
        return reply


def _failure(reason: str) -> Shareable:
    reply = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    reply[REASON] = reason[:500]
    return reply

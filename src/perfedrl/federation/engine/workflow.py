"""The server's end of the engine: broadcasts the rounds of a run and collects what comes back."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.workflows.model_controller import ModelController

from perfedrl.federation.engine.bridge import FRAME, REASON
from perfedrl.federation.engine.timeouts import CHECK_PERIOD, hasten
from perfedrl.federation.server.answers import Answers
from perfedrl.federation.server.rounds import Coordinator, failed
from perfedrl.federation.server.run_folder import Control, Stale
from perfedrl.federation.server.upload_checks import printable

PAUSE = 0.002
"""Seconds between two looks at what has come in."""


class Rounds(ModelController):
    """Runs what is left of a run, from its last checkpoint on; `control` is the run's folder on this machine."""

    def __init__(self, control: str, generation: int):
        super().__init__(persistor_id="", ignore_result_error=True, task_check_period=CHECK_PERIOD)
        self.control, self.generation = control, generation
        self._late: set[str] = set()

    def start_controller(self, fl_ctx: FLContext) -> None:
        super().start_controller(fl_ctx)
        hasten(self.communicator)

    def run(self) -> None:
        """Called by the engine. An error that a user can understand ends the job with its sentence."""
        folder = Path(self.control)
        try:
            Coordinator(folder, self.generation).run(self.ask)
        except Stale as error:
            self.warning(str(error))
        except Exception as error:
            failed(Control(folder), self.generation, error)
            raise

    def ask(
        self, kind: str, frame: bytes, without: set[str], enough: Callable[[Answers], bool], deadline: float
    ) -> Answers:
        """Send a frame to the agents of the job and wait until there are enough answers, or until the deadline."""
        clients = sorted({client.name for client in self.engine.get_clients()} - without)
        late, self._late = self._late, set()
        answers = Answers(asked=tuple(clients), late=tuple(late))

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:  # noqa: ARG001
            name, result = client_task.client.name, client_task.result
            client_task.result = None
            if result.get_return_code() == ReturnCode.OK and isinstance(result.get(FRAME), bytes):
                answers.frames[name] = result[FRAME]
            else:
                reason = result.get(REASON)
                answers.failures[name] = printable(reason if isinstance(reason, str) else result.get_return_code())

        data = Shareable()
        data[FRAME] = frame
        task = Task(name=kind, data=data, timeout=0, result_received_cb=received)
        if clients:
            self.broadcast(task, self.fl_ctx, targets=clients, min_responses=0)
        end = time.monotonic() + deadline
        while not enough(answers) and answers.silent and time.monotonic() < end:
            if self.abort_signal.triggered:
                raise Stale("the job was stopped")
            time.sleep(PAUSE)
        if answers.silent:
            self.cancel_task(task, fl_ctx=self.fl_ctx)
        return replace(answers, frames=dict(answers.frames), failures=dict(answers.failures))

    def process_result_of_unknown_task(self, client: Any, task_name: str, *rest: Any) -> None:
        """An answer after its round has closed; the agent keeps its own copy and says it again when asked."""
        self._late.add(client.name)
        self.info(f"{client.name} answered {task_name} too late")

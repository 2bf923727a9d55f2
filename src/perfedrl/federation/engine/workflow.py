"""NVFlare's controller on the server: broadcasts the coordinator's questions and collects the agents' answers."""

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

from perfedrl.errors import UserError
from perfedrl.federation.engine.bridge import FRAME, REASON
from perfedrl.federation.engine.fleet_folder import control_folder
from perfedrl.federation.server.answers import Answers
from perfedrl.federation.server.coordinator import Coordinator
from perfedrl.federation.server.presenter import show_failure
from perfedrl.federation.server.run_folder import RunFolder, StaleJob
from perfedrl.federation.server.upload_checks import printable

PAUSE = 0.002
"""Seconds between two checks for new answers."""
CHECK_PERIOD = 0.005
"""Seconds between two checks of the server's open tasks; NVFlare's default of 0.2 is made for long rounds."""
_PRIVATE = "_task_check_period"


class Rounds(ModelController):
    """Trains a run from its last checkpoint on; `control` is the name of its folder in the fleet's `control`.

    NVFlare runs a job in the folder of the server's kit.
    """

    def __init__(self, control: str, generation: int):
        super().__init__(persistor_id="", ignore_result_error=True, task_check_period=CHECK_PERIOD)
        self.control, self.generation = str(control_folder(Path.cwd(), control)), generation
        self._late: set[str] = set()

    def start_controller(self, fl_ctx: FLContext) -> None:
        super().start_controller(fl_ctx)
        set_check_period(self.communicator)

    def run(self) -> None:
        """Train; called by NVFlare. An error is shown in the run's folder and ends the job."""
        folder = Path(self.control)
        try:
            Coordinator(folder, self.generation).run(self.ask)
        except StaleJob as error:
            self.warning(str(error))
        except Exception as error:
            show_failure(RunFolder(folder), self.generation, error)
            raise

    def ask(
        self, kind: str, frame: bytes, without: set[str], enough: Callable[[Answers], bool], deadline: float
    ) -> Answers:
        """Send a frame to the job's agents and wait for enough answers, or until the deadline (see `AskAgents`)."""
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
                raise StaleJob("the job was stopped")
            time.sleep(PAUSE)
        if answers.silent:
            self.cancel_task(task, fl_ctx=self.fl_ctx)
        return replace(answers, frames=dict(answers.frames), failures=dict(answers.failures))

    def process_result_of_unknown_task(self, client: Any, task_name: str, *rest: Any) -> None:
        """Note an answer that came after its question was closed; the agent has stored it and repeats it when asked."""
        self._late.add(client.name)
        self.info(f"{client.name} answered {task_name} too late")


def set_check_period(communicator: Any) -> None:
    """Set how often the server checks its tasks.

    A controller's own `task_check_period` has no effect in NVFlare 2.9: it is written to a public attribute of the
    communicator, which reads a private one.
    """
    if not hasattr(communicator, _PRIVATE):
        raise UserError(f"this NVFlare's communicator has no {_PRIVATE}; perfedrl needs NVFlare 2.9")
    setattr(communicator, _PRIVATE, CHECK_PERIOD)

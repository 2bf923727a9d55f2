"""NVFlare's controller on the server: broadcasts the coordinator's questions and collects the agents' answers."""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.workflows.model_controller import ModelController

from perfedrl.federation.engine.bridge import FRAME, REASON
from perfedrl.federation.engine.fleet_folder import control_folder
from perfedrl.federation.engine.message_limits import ENVELOPE, write_largest_message
from perfedrl.federation.engine.nvflare_settings import let_no_agent_end_the_job, limit_blobs, replace_attribute
from perfedrl.federation.engine.server_guard import CONNECTION_LOST, SILENCE, SILENT
from perfedrl.federation.server.answers import Answers
from perfedrl.federation.server.coordinator import Coordinator
from perfedrl.federation.server.presenter import show_failure
from perfedrl.federation.server.run_folder import RunFolder, StaleJob
from perfedrl.federation.server.upload_checks import printable

PAUSE = 0.002
"""Seconds between two checks for new answers."""
CHECK_PERIOD = 0.005
"""Seconds between two checks of the server's open tasks; NVFlare's default of 0.2 is made for long rounds, and a
controller's own `task_check_period` has no effect in NVFlare 2.9."""
UPDATE = "update"
"""The kind of the questions whose late answers are kept."""


class Rounds(ModelController):
    """Trains a run from its last checkpoint on; `control` is the name of its folder in the fleet's `control`.

    NVFlare runs a job in the folder of the server's kit.
    """

    def __init__(self, control: str, generation: int):
        super().__init__(persistor_id="", ignore_result_error=True, task_check_period=CHECK_PERIOD)
        self.control, self.generation = str(control_folder(Path.cwd(), control)), generation
        self._late: dict[str, bytes] = {}
        self._gone: dict[str, str] = {}
        self._heard: dict[str, float] = {}

    def start_controller(self, fl_ctx: FLContext) -> None:
        super().start_controller(fl_ctx)
        replace_attribute(self.communicator, "_task_check_period", CHECK_PERIOD)
        replace_attribute(self.communicator, "process_dead_client_report", self.client_gone)
        replace_attribute(self.communicator, "client_is_active", self.client_active)
        let_no_agent_end_the_job(fl_ctx.get_prop(FLContextKey.RUNNER))

    def client_gone(self, report: str, *_context: Any) -> None:
        """Note that an agent's process of this job is gone; called by NVFlare with what the server's guard tells it."""
        name, _, reason = report.partition(" ")
        silent = time.monotonic() - self._heard.get(name, -math.inf) > SILENT
        if name not in self._gone and (silent or reason != SILENCE):
            self._gone[name] = reason or CONNECTION_LOST
            RunFolder(Path(self.control)).log("gone", agent=name, generation=self.generation, reason=self._gone[name])

    def client_active(self, name: str, *_context: Any) -> None:
        """Note that an agent's process asks for work; called by NVFlare."""
        self._heard[name] = time.monotonic()
        self._gone.pop(name, None)

    def run(self) -> None:
        """Train; called by NVFlare. An error is shown in the run's folder and ends the job."""
        folder = Path(self.control)
        members = sorted(client.name for client in self.engine.get_clients())
        RunFolder(folder).log("members", generation=self.generation, agents=members)
        try:
            Coordinator(folder, self.generation, limit_answers=self.limit_answers).run(self.ask)
        except StaleJob as error:
            self.warning(str(error))
        except Exception as error:
            show_failure(RunFolder(folder), self.generation, error)
            raise

    def limit_answers(self, size: int) -> None:
        """Let NVFlare reject what is larger than the run's largest answer, here and in the server's own process."""
        limit_blobs(self.engine.get_cell(), size + ENVELOPE)
        write_largest_message(Path.cwd(), size)

    def ask(
        self, kind: str, frame: bytes, without: set[str], enough: Callable[[Answers], bool], deadline: float
    ) -> Answers:
        """Send a frame to the job's agents and wait for enough answers, or until the deadline (see `AskAgents`)."""
        self._check_abort()
        clients = sorted({client.name for client in self.engine.get_clients()} - without - set(self._gone))
        late, self._late = self._late, {}
        answers = Answers(tuple(clients), late=tuple(late), late_uploads={name: x for name, x in late.items() if x})

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
            self._check_abort()
            for name in answers.silent & set(self._gone):
                answers.failures[name] = self._gone.get(name, "")
            time.sleep(PAUSE)
        if answers.silent:
            self.cancel_task(task, fl_ctx=self.fl_ctx)
        return replace(answers, frames=dict(answers.frames), failures=dict(answers.failures))

    def _check_abort(self) -> None:
        if self.abort_signal.triggered:
            raise StaleJob("the job was stopped")

    def process_result_of_unknown_task(
        self, client: Any, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Note an answer that came after its question was closed; the agent has stored it and repeats it when asked."""
        upload = result.get(FRAME) if task_name == UPDATE and result.get_return_code() == ReturnCode.OK else None
        self._late[client.name] = upload if isinstance(upload, bytes) else b""
        self.info(f"{client.name} answered {task_name} too late")

"""The server's job: carry out the state machine's commands with real agents, a real clock and the run's folder."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from perfedrl.errors import UserError
from perfedrl.experiments.provenance import provenance
from perfedrl.experiments.store import has_run, read_provenance, save_run
from perfedrl.federation.environment_report import PLAN_TABLE, EnvironmentReport, agents_bring_environments, with_report
from perfedrl.federation.server.answers import Answers, AskAgents
from perfedrl.federation.server.asynchronous_rounds import ARRIVALS
from perfedrl.federation.server.commands import Announce, Command, Fail, Finish, HandOver, Log, Pause, Question, Save
from perfedrl.federation.server.environment_agreement import settled_report
from perfedrl.federation.server.network_config import check_uploads, config_of, plan_text
from perfedrl.federation.server.presenter import Presenter
from perfedrl.federation.server.run_folder import RunFolder, ServerCheckpoint
from perfedrl.federation.server.run_state_machine import RunStateMachine
from perfedrl.own_modules import find_modules_in
from perfedrl.simulation.observers import Observer, announce
from perfedrl.simulation.run_state import RunState

PAUSE = 1.0
"""Seconds before a question is repeated that too few agents answered."""


class Coordinator:
    """Trains a run from its last checkpoint to its end; a crash costs at most the round under way.

    `observers` watch it like a simulated run. `limit_answers` is told the size in bytes of the run's largest answer.
    """

    def __init__(
        self,
        folder: Path,
        generation: int,
        observers: Sequence[Observer] = (),
        limit_answers: Callable[[int], None] = lambda _: None,
    ):
        self.folder, self.generation, self.observers = RunFolder(folder), generation, tuple(observers)
        self.limit_answers = limit_answers
        with self.folder.writing(generation):
            self.spec = self.folder.spec()
        for place in self.spec.folders:
            find_modules_in(Path(place))
        try:
            self.config = config_of(self.spec.config)
        except UserError as error:
            raise UserError(f"the server's job cannot read the run's config: {error}") from error

    def run(self, ask: AskAgents) -> None:
        """Train to the end."""
        self._open(ask).train(ask)

    def _open(self, ask: AskAgents) -> "OpenRun":
        """Build the run, on the agents' report where they bring their environments, which they are asked for first."""
        presenter = Presenter(self.folder, self.spec.run, self.generation, self.config.rounds, self.spec.agents)
        config, report = self.config, None
        if agents_bring_environments(config):
            report = settled_report(presenter, self.spec, self.generation, ask)
            config = with_report(config, report)
            check_uploads(config)
        machine = RunStateMachine(config, self.spec, self.generation, plan_text(self.spec.config, report))
        self.limit_answers(machine.largest_answer)
        saved = self.folder.load_checkpoint(self.spec.run, machine.start)
        return OpenRun(machine, saved, presenter, self.observers, report)


class OpenRun:
    """A run that is being trained: its state machine, its state, and what is told of it."""

    def __init__(
        self,
        machine: RunStateMachine,
        saved: ServerCheckpoint | None,
        presenter: Presenter,
        observers: tuple[Observer, ...],
        report: EnvironmentReport | None,
    ):
        self.machine, self.presenter, self.report, self.folder = machine, presenter, report, presenter.folder
        self.config, self.spec, self.generation = machine.config, machine.spec, machine.generation
        self.observers = (presenter, *observers)
        self.state, self._first_commands = machine.begin(saved)
        self.seconds = 0.0 if saved is None else saved.seconds
        self._began = time.monotonic() - self.seconds

    def train(self, ask: AskAgents) -> None:
        """Train to the end, or to the end of the last round if newcomers are to be taken in."""
        if self._saved():
            self.presenter.on_start(self.run_state)
            self._end()
            return
        for observer in self.observers:
            observer.on_start(self.run_state)
        asked: dict[tuple[str, int], float] = {}
        commands: Sequence[Command] = self._first_commands
        while question := self._carry_out(commands):
            began = asked.setdefault((question.kind, question.round), time.monotonic())
            answers = self._ask(ask, question)
            self.state, commands = self.machine.answered(self.state, answers, time.monotonic() - began)
            if self.state.round > question.round:
                self.presenter.round_took(time.monotonic() - began)

    def _ask(self, ask: AskAgents, question: Question) -> Answers:
        """Send a question and show the answers while they come in."""

        def enough(answers: Answers) -> bool:
            self.presenter.waiting(self.state, answers)
            return question.enough(answers)

        return ask(question.kind, question.frame, set(question.without), enough, self.spec.terms.deadline)

    def _carry_out(self, commands: Sequence[Command]) -> Question | None:
        """Carry out commands in order; return the question among them, if there is one."""
        for command in commands:
            match command:
                case Log(event, fields):
                    self.presenter.log(event, fields)
                case Save():
                    self._save()
                case Announce():
                    announce(self.observers, self.run_state)
                case Pause():
                    time.sleep(PAUSE)
                case HandOver():
                    self.presenter.show(self.state)
                case Finish():
                    self._finish()
                case Fail(reason):
                    raise UserError(reason)
                case Question():
                    return command
        return None

    @property
    def run_state(self) -> RunState:
        """The run as observers see it, without the states of the agents, which stay on their machines."""
        return RunState(self.state.round, None, self.state.history, self.config.name, self.config.rounds)

    @property
    def runs(self) -> Path:
        """The folder of finished runs."""
        return (self.folder.path / self.spec.runs).resolve()

    def _save(self) -> None:
        """Write a checkpoint."""
        self.seconds = time.monotonic() - self._began
        state, seed = self.state, self.config.seeds[0]
        kept = (
            state.server,
            state.history,
            state.gate.snapshot(),
            self.seconds,
            dict(state.counted),
            state.arrivals,
            state.best,
        )
        checkpoint = ServerCheckpoint(self.spec.run, seed, state.round, *kept)
        self.folder.save_checkpoint(checkpoint, self.generation)

    def _finish(self) -> None:
        """Save the finished run like one that was simulated."""
        federation: dict[str, Any] = {"run": self.spec.run, "agents": list(self.spec.agents)}
        federation |= {} if self.report is None else {PLAN_TABLE: self.report.table()}
        federation |= {ARRIVALS: self.state.arrivals} if self.state.arrivals else {}
        about = {**provenance(self.seconds), "federation": federation}
        message, best = (jax.tree.map(lambda x: x[None], x) for x in (self.state.server.message, self.state.best))
        assert self.state.history is not None
        with self.folder.writing(self.generation):
            save_run(self.runs, self.config, self.state.history, None, message, about, best)
        self.presenter.log("finished", {"round": self.state.round})
        self._end()

    def _end(self) -> None:
        """Remove the checkpoints, and report the end last, since the supervisor acts on it."""
        self.folder.remove_checkpoints()
        self.state = replace(self.state, phase="finished")
        self.presenter.show(self.state)

    def _saved(self) -> bool:
        """Whether an earlier job saved the finished run but died before it could report that."""
        if not has_run(self.runs, self.config):
            return False
        return read_provenance(self.runs / self.config.folder).get("federation", {}).get("run") == self.spec.run

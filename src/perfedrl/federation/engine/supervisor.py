"""Trains a run over the engine, whatever happens to the engine: submits jobs until the run is finished."""

import math
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfedrl.errors import UserError
from perfedrl.experiments.config import Config
from perfedrl.experiments.store import has_run
from perfedrl.federation.agent.answer_store import NAME
from perfedrl.federation.engine.admin_session import Declined, Operator, Unreachable
from perfedrl.federation.engine.fleet_folder import FleetFolder
from perfedrl.federation.engine.jobs import write_job
from perfedrl.federation.engine.processes import check_clock
from perfedrl.federation.engine.service import running
from perfedrl.federation.server.network_config import networked
from perfedrl.federation.server.run_folder import Control, Plan, Terms

POLL, LOOK = 0.2, 2.0
"""Seconds between two looks at a run's progress, and at its job and its agents."""
SETTLE = 10.0
"""Seconds that a job may take to reach all its agents."""
AGAIN = 30.0
"""Seconds after which an agent that did not stay in a job is taken in again, twice as many each time."""
LEAST_DISK = 2**20
MOST_IN_VAIN = 5
"""Jobs that may end without a round before a person is asked."""


@dataclass
class View:
    """What there is to see: the run's own progress, who is connected, and what the supervisor does."""

    doing: str
    progress: dict[str, Any] = field(default_factory=dict)
    connected: set[str] = field(default_factory=set)
    expected: tuple[str, ...] = ()
    news: list[dict[str, Any]] = field(default_factory=list)
    """What happened since the last look."""


Watch = Callable[[View], None]


def prepare(
    fleet: FleetFolder,
    config: Config,
    terms: Terms,
    seed: int | None = None,
    restart: bool = False,
    release: Sequence[str] = (),
) -> Control:
    """The folder of a run, new or half done; what is wrong is said before anything is sent.

    Agents in `release` are let out of quarantine.
    """
    config = networked(config, seed)
    needed, there = config.parts.fleet.agents, len(fleet.about.agents)
    if needed > there:
        raise UserError(f"the config needs {needed} agents, and the fleet in {fleet.folder} has {there}")
    least = max(terms.min_agents, config.parts.algorithm.least_agents)
    if least > needed:
        raise UserError(f"{least} agents are needed in every round, and the config has {needed}")
    control = Control(fleet.control(config.folder))
    if restart:
        control.clear()
    run = control.plan().run if control.checkpoint.exists() else f"{config.folder}-{secrets.token_hex(4)}"
    if not NAME.fullmatch(run):
        raise UserError(f"the config's name is too long for a run's: {config.name}")
    names = fleet.about.agents[:needed]
    terms = Terms(**{**vars(terms), "min_agents": least})
    since = control.generation() + 1
    control.write_plan(Plan(run, config.to_toml(), names, terms, str(fleet.runs), tuple(release), since))
    return control


def finished(fleet: FleetFolder, config: Config, seed: int | None = None) -> Path | None:
    """The folder of a run that is finished already, and has not been begun again."""
    config = networked(config, seed)
    begun_again = Control(fleet.control(config.folder)).checkpoint.exists()
    return fleet.runs / config.folder if has_run(fleet.runs, config) and not begun_again else None


class Supervisor:
    """Keeps a run going until it is finished.

    All its agents are waited for, but once `wait` seconds have passed `min_agents` are enough; those who come later are
    taken in by a new job. Jobs that were replaced are fenced: neither the run's folder nor an agent listens to them.
    """

    def __init__(self, fleet: FleetFolder, control: Control, wait: float, watch: Watch = lambda _: None):
        if not 0 <= wait < math.inf:
            raise UserError(f"wait must be a finite number >= 0; it is {wait}")
        self.fleet, self.control, self.wait, self.watch = fleet, control, wait, watch
        self.plan = control.plan()
        self.jobs = 0
        self._in_vain, self._round, self._counted = 0, -1, 0
        self._told, self._ended = control.news(0)[1], set[str]()
        self._taken_in: dict[str, tuple[int, float]] = {}

    def run(self) -> None:
        """To the end of the run; an error that no new job can mend is raised."""
        check_clock(self.fleet.operator / "startup" / "client.crt")
        folder = self.fleet.folder / "control"
        with running(folder, "a training of this fleet"):
            while not self._one_job():
                self._check_progress()

    def _one_job(self) -> bool:
        """Whether the run is finished after one more job."""
        operator = self._connect()
        try:
            agents = self._gather(operator)
            job = self._submit(operator, agents)
            return self._follow(operator, job, agents)
        except Unreachable as error:
            self.control.say("server lost", reason=str(error))
        except Declined as error:
            self.control.say("job lost", reason=str(error))
        finally:
            operator.close()
        return False

    def _show(self, doing: str, connected: set[str] | None = None) -> None:
        news, self._told = self.control.news(self._told)
        self.watch(View(doing, self.control.progress(), connected or set(), self.plan.agents, news))

    def _connect(self) -> Operator:
        while True:
            self._show("waiting for the server")
            with suppress(Unreachable):
                return Operator(self.fleet, timeout=5.0)
            time.sleep(1.0)

    def _gather(self, operator: Operator) -> list[str]:
        """Wait for the agents."""
        end = time.monotonic() + self.wait
        while True:
            connected = operator.connected() & set(self.plan.agents)
            self._show("waiting for agents", connected)
            late = time.monotonic() > end
            if len(connected) == len(self.plan.agents) or (late and len(connected) >= self.plan.terms.min_agents):
                return sorted(connected)
            time.sleep(0.5)

    def _submit(self, operator: Operator, agents: list[str]) -> str:
        for old in set(operator.unfinished()) - self._ended:
            self._ended.add(old)  # a server that was killed goes on calling its jobs unfinished
            with suppress(Declined):
                operator.abort(old)
        generation = self.control.next_generation()
        folder = write_job(
            self.control.folder / "job", self.control.folder, generation, agents, self.plan.terms.deadline
        )
        job = operator.submit(folder)
        self.jobs += 1
        self.control.say("submitted", generation=generation, job=job, agents=agents)
        return job

    def _follow(self, operator: Operator, job: str, agents: list[str]) -> bool:
        """Whether the run is finished when the job is."""
        try:
            return self._watch_job(operator, job, set(agents))
        except KeyboardInterrupt:
            self.control.next_generation()
            with suppress(Unreachable, Declined):
                operator.abort(job)
            raise

    def _watch_job(self, operator: Operator, job: str, agents: set[str]) -> bool:
        generation, began = self.control.generation(), time.monotonic()
        looked, idle, connected = began, set[str](), set(agents)
        while True:
            time.sleep(POLL)
            progress = self.control.progress()
            if progress.get("generation") == generation:
                if progress["phase"] == "finished":
                    self._show("finished")
                    return True
                if progress["phase"] == "failed" and progress.get("mendable"):
                    raise UserError(progress["error"])
            self._show("training", connected)
            if time.monotonic() - looked < LOOK:
                continue
            looked = time.monotonic()
            if operator.status(job).startswith("FINISHED"):
                self.control.say("job lost", job=job)
                now = self.control.progress()
                return now.get("generation") == generation and now.get("phase") == "finished"
            connected = operator.connected() & set(self.plan.agents)
            without, idle = idle, connected & operator.idle(job)
            if looked - began > SETTLE and (coming := self._taking_in(idle & without)):
                self.control.say("membership", agents=coming)
                with suppress(Declined):
                    operator.abort(job)
                return False

    def _taking_in(self, idle: set[str]) -> list[str]:
        """Who of the idle agents is worth a new job: one that never stays is tried more and more rarely."""
        now, coming = time.monotonic(), []
        for name in sorted(idle):
            tries, last = self._taken_in.get(name, (0, -math.inf))
            if now - last > AGAIN * 2**tries:
                self._taken_in[name] = tries + 1, now
                coming.append(name)
        return coming

    def _check_progress(self) -> None:
        """Refuse to submit for ever what never gets anywhere."""
        progress = self.control.progress()
        now = progress.get("round", -1)
        if self.jobs == self._counted:
            return
        self._in_vain = 0 if now != self._round else self._in_vain + 1
        self._round, self._counted = now, self.jobs
        if self._in_vain >= MOST_IN_VAIN:
            why = progress.get("error", "the logs in the folder `server` say why")
            raise UserError(f"{self._in_vain} jobs ended without a round: {why}")
        if shutil.disk_usage(self.control.folder).free < LEAST_DISK:
            raise UserError(f"the disk is full: {self.control.folder}; the last checkpoint is intact")

"""The supervisor of a networked run: submits jobs to NVFlare until the run is finished, through crashes."""

import math
import os
import secrets
import shutil
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from perfedrl.errors import UserError
from perfedrl.experiments.build import PLAIN_MEAN
from perfedrl.experiments.config import Config
from perfedrl.experiments.settings import read_table
from perfedrl.experiments.store import has_run
from perfedrl.federation.agent.answer_store import NAME
from perfedrl.federation.engine.admin_session import Operator, RequestDeclined, ServerUnreachable, fresh
from perfedrl.federation.engine.fleet_folder import FleetFolder
from perfedrl.federation.engine.jobs import write_job
from perfedrl.federation.engine.message_limits import excess
from perfedrl.federation.engine.processes import check_clock
from perfedrl.federation.engine.server_guard import PROCESS_ENDED
from perfedrl.federation.engine.service import exclusive_service
from perfedrl.federation.environment_report import agents_of
from perfedrl.federation.server.network_config import least_agents, networked, with_plain_mean
from perfedrl.federation.server.run_folder import TRAINED, RunFolder, RunSpec, Terms

POLL, POLL_SERVER = 0.1, 1.0
"""Seconds between two reads of a run's progress, and between two requests for the status of its job and agents."""
MOST_ENDS, FORGIVEN = 2, 10
"""Ends of an agent's job processes at which it is excluded, and rounds of the agent after which they are forgotten."""
READMIT = 30.0
"""Seconds after which an agent that left a job is taken into a new one; doubled each time."""
STUCK = 10.0
"""Seconds after which a connected agent that missed a deadline and stays silent is taken into a new job."""
LEAST_DISK = 2**20
MOST_FRUITLESS = 5
"""Jobs in a row that may end without a round before the supervisor gives up."""


@dataclass
class View:
    """What the supervisor shows: its own activity, the run's progress, and the connected agents."""

    doing: str
    progress: dict[str, Any] = field(default_factory=dict)
    connected: set[str] = field(default_factory=set)
    expected: tuple[str, ...] = ()
    news: list[dict[str, Any]] = field(default_factory=list)
    """The events since the last view."""


Watch = Callable[[View], None]


@contextmanager
def only_training(fleet: FleetFolder) -> Iterator[None]:
    """Keep other processes from training this fleet; to be held around `prepare` and `Supervisor.run`."""
    with exclusive_service(fleet.folder / "control", "a training of this fleet"):
        yield


def config_to_train(fleet: FleetFolder, config: Config, seed: int | None = None, restart: bool = False) -> Config:
    """The networked config of a run: a run that was begun before networks had a default aggregation keeps the mean.

    Such a run, unfinished or finished, has a config without [aggregation]. It counts unless the run is to be restarted
    or has been begun with the default since.
    """
    derived = networked(config, seed)
    if restart or config.aggregation is not None or derived.aggregation == PLAIN_MEAN:
        return derived
    averaged = with_plain_mean(derived)
    run_folder = RunFolder(fleet.control(averaged.folder))
    if fleet.control(derived.folder).exists():
        return derived
    if run_folder.checkpoint_path.exists():
        begun = tomllib.loads(run_folder.spec().config)
    elif has_run(fleet.runs, averaged):
        begun = read_table(fleet.runs / averaged.folder / "config.toml", "config")
    else:
        return derived
    return derived if "aggregation" in begun else networked(averaged)


def prepare(
    fleet: FleetFolder,
    config: Config,
    terms: Terms,
    seed: int | None = None,
    restart: bool = False,
    release: Sequence[str] = (),
    folders: Sequence[Path] = (),
) -> RunFolder:
    """Check a config and create the run's folder, or open it if the run is unfinished.

    `config` may be a `networked` one already, whose experiment is then not built again. Agents in `release` leave
    quarantine. The fleet's agents beyond those that the config trains are newcomers, which personalize at the end.
    Modules that the config names are looked for in `folders`, by default in the current one. The caller holds
    `only_training`, since files of the run are deleted and written.
    """
    config = networked(config, seed)
    needed, there = agents_of(config), len(fleet.info.agents)
    if needed > there:
        raise UserError(f"the config needs {needed} agents, but the fleet in {fleet.folder} has {there}")
    least = max(terms.min_agents, least_agents(config))
    if least > needed:
        raise UserError(f"every round needs {least} agents, but the config has {needed}")
    run_folder = RunFolder(fleet.control(config.folder))
    if restart:
        run_folder.clear()
    if run_folder.checkpoint_path.exists():
        run, text = run_folder.spec().run, run_folder.spec().config
    else:
        run, text = f"{config.folder}-{secrets.token_hex(4)}", config.to_toml()
        run_folder.forget_report()
    if not NAME.fullmatch(run):
        raise UserError(f"the config's name is too long for a run's id: {config.name}")
    names, newcomers = fleet.info.agents[:needed], fleet.info.agents[needed:] if terms.personalize else ()
    terms = Terms(**{**vars(terms), "min_agents": least})
    run_folder.release(release)
    since = run_folder.generation() + 1
    places = tuple(str(folder) for folder in folders or (Path.cwd(),))
    runs = os.path.relpath(fleet.runs, run_folder.path)
    run_folder.write_spec(RunSpec(run, text, names, terms, runs, tuple(release), since, newcomers, places))
    return run_folder


def finished(fleet: FleetFolder, config: Config, seed: int | None = None) -> Path | None:
    """The folder of the finished run, if there is one and it has not been restarted."""
    config = networked(config, seed)
    restarted = RunFolder(fleet.control(config.folder)).checkpoint_path.exists()
    return fleet.runs / config.folder if has_run(fleet.runs, config) and not restarted else None


def too_few_left(least: int, excluded: Sequence[str]) -> str:
    """The error of a run of which too many agents are excluded."""
    names, options = ", ".join(excluded), " ".join(f"--release {name}" for name in excluded)
    return (
        f"every round needs {least} agents, but fewer are left without {names}, whose processes ended again and again; "
        f"see bridge.log on their machines, then continue with {options}"
    )


class Supervisor:
    """Submits jobs until a run is finished.

    It waits for all agents that train; after `wait` seconds `min_agents` of them are enough, and agents that come later
    are taken in by a new job. Newcomers are only in jobs after the last round, so that they cannot disturb training.
    Replaced jobs are fenced off: they can neither write to the run's folder nor get an answer.
    """

    def __init__(self, fleet: FleetFolder, run_folder: RunFolder, wait: float, watch: Watch = lambda _: None):
        if not 0 <= wait < math.inf:
            raise UserError(f"wait must be a finite number >= 0, got {wait}")
        self.fleet, self.run_folder, self.wait, self.watch = fleet, run_folder, wait, watch
        self.spec = run_folder.spec()
        self.jobs = 0
        self._rounds: int = tomllib.loads(self.spec.config)["rounds"]
        self._operator: Operator | None = None
        self._members, self._awaited_newcomers = self.spec.agents, False
        self._fruitless, self._round, self._counted = 0, -1, 0
        self._log_offset, self._ended = run_folder.events_since(0)[1], set[str]()
        self._admissions: dict[str, tuple[int, float]] = {}
        self._generation, self._submitted = 0, set[str]()
        self._gone_since: dict[str, float] = {}
        self._ends, self._rounds_since = Counter[str](), Counter[str]()
        self._excess: dict[str, float] = excess(fleet.server)

    def run(self) -> None:
        """Train to the end of the run; raise errors that a new job cannot solve. Ctrl-C aborts the job."""
        check_clock(self.fleet.operator / "startup" / "client.crt")
        try:
            while not self._one_job():
                self._check_progress()
        except KeyboardInterrupt:
            self._stop()
            raise
        finally:
            self._disconnect()

    def _one_job(self) -> bool:
        """Submit one job and follow it; return whether the run is finished."""
        try:
            operator = self._connect()
            agents = self._gather(operator)
            job = self._submit(operator, agents)
            return self._watch_job(operator, job, set(agents))
        except ServerUnreachable as error:
            self.run_folder.log("server lost", reason=str(error))
            self._disconnect()
        except RequestDeclined as error:
            self.run_folder.log("job lost", reason=str(error))
        return False

    def _stop(self) -> None:
        """Fence off the jobs of the run, abort them if the server answers, and show that the run is stopped."""
        self.run_folder.next_generation()
        if self._operator is not None:
            with suppress(ServerUnreachable, RequestDeclined):
                self._abort_unfinished(self._operator)
        self.run_folder.write_progress({**self.run_folder.progress(), "phase": "stopped", "agents": {}})

    def _show(self, doing: str, connected: set[str] | None = None) -> None:
        """Pass a view to `watch`, with the news of the run, which are noted first."""
        news, self._log_offset = self.run_folder.events_since(self._log_offset)
        for event in news:
            self._note(event)
        self.watch(View(doing, self.run_folder.progress(), connected or set(), self._members, news))

    def _note(self, event: Mapping[str, Any]) -> None:
        """Note which agents are not in the job, or gone from it, and exclude one whose process ends again and again."""
        if event["event"] == "members" and event["generation"] == self._generation:
            self._gone_since |= dict.fromkeys(self._submitted - set(event["agents"]), event["time"])
        elif event["event"] == "gone" and event["generation"] == self._generation:
            name = event["agent"]
            self._gone_since[name] = event["time"]
            self._rounds_since.pop(name, None)
            self._ends[name] += event["reason"] == PROCESS_ENDED
            if self._ends[name] >= MOST_ENDS and name not in self.run_folder.excluded():
                self.run_folder.exclude(name)
        elif event["event"] == "round":
            for name in event["agents"]:
                self._gone_since.pop(name, None)
                self._rounds_since[name] += 1
                if self._rounds_since[name] >= FORGIVEN:
                    self._ends.pop(name, None)

    def _name_excess(self) -> None:
        """Log which kits sent more than their share since the last call."""
        known, self._excess = self._excess, excess(self.fleet.server)
        for name in sorted(self._excess):
            if self._excess[name] != known.get(name):
                self.run_folder.log("excess", agent=name)

    def _connect(self) -> Operator:
        """Wait for the server, and connect to it, unless the connection of the last job still works."""
        if self._operator is not None:
            return self._operator
        doing = "connecting to the server"
        while True:
            self._show(doing)
            with suppress(ServerUnreachable):
                self._operator = Operator(self.fleet, timeout=5.0)
                return self._operator
            doing = f"waiting for the server, which `perfedrl federation server {self.fleet.folder}` starts"
            time.sleep(POLL)

    def _disconnect(self) -> None:
        """Close the connection to the server, if there is one."""
        if self._operator is not None:
            self._operator.close()
            self._operator = None

    def _gather(self, operator: Operator) -> list[str]:
        """Wait for the agents of the next job, for newcomers only once; return the connected ones."""
        end, least = time.monotonic() + self.wait, self.spec.terms.min_agents
        over = self.run_folder.rounds_done() >= self._rounds
        excluded = self._check_excluded()
        everybody = (*self.spec.agents, *self.spec.newcomers) if over else self.spec.agents
        self._members = tuple(name for name in everybody if name not in excluded)
        members, trained = set(self._members), set(self.spec.agents) - excluded
        expected = trained if self._awaited_newcomers else members
        while True:
            connected = operator.connected() & members
            self._show("waiting for agents", connected)
            late = time.monotonic() > end
            if connected >= expected or (late and len(connected & trained) >= least):
                self._awaited_newcomers = over
                return sorted(connected)
            time.sleep(POLL)

    def _check_excluded(self) -> set[str]:
        """The excluded agents; an error that ends the job if too few are left without them."""
        excluded, least = set(self.run_folder.excluded()), self.spec.terms.min_agents
        if len(set(self.spec.agents) - excluded) < least:
            self._stop()
            raise UserError(too_few_left(least, sorted(excluded)))
        return excluded

    def _submit(self, operator: Operator, agents: list[str]) -> str:
        """Submit a job of a new generation, then abort the old ones, which are stale already; return its id."""
        self._generation = generation = self.run_folder.next_generation()
        folder = write_job(
            self.run_folder.path / "job", self.run_folder.path.name, generation, agents, self.spec.terms.deadline
        )
        job = operator.submit(folder)
        self.jobs += 1
        self._submitted = set(agents)
        self._gone_since.clear()
        self.run_folder.log("submitted", generation=generation, job=job, agents=agents)
        self._abort_unfinished(operator, job)
        return job

    def _abort_unfinished(self, operator: Operator, but: str | None = None) -> None:
        """Abort all other jobs that the server considers unfinished, each once, and delete what is left of the rest."""
        for job, over in operator.jobs().items():
            with suppress(RequestDeclined):
                if over:
                    operator.delete(job)
                elif job not in {*self._ended, but}:
                    self._ended.add(job)  # a server that was killed lists its jobs as unfinished for ever
                    operator.abort(job)

    def _watch_job(self, operator: Operator, job: str, agents: set[str]) -> bool:
        """Poll a job until the run or the job ends, or until agents are to be taken in; return whether all is done."""
        generation, polled = self.run_folder.generation(), time.monotonic()
        connected, silent = set(agents), dict[str, float]()
        while True:
            time.sleep(POLL)
            progress = self.run_folder.progress()
            if progress.get("generation") == generation:
                if progress["phase"] == "finished":
                    self._show("finished")
                    return True
                if progress["phase"] == TRAINED:
                    return False
                if progress["phase"] == "failed" and progress.get("mendable"):
                    raise UserError(progress["error"])
                if not psutil.pid_exists(progress.get("pid", os.getpid())):
                    return self._lost(job, generation)
            self._show("training", connected)
            if time.monotonic() - polled < POLL_SERVER:
                continue
            polled = time.monotonic()
            self._name_excess()
            if operator.status(job).startswith("FINISHED"):
                return self._lost(job, generation)
            heartbeats, members = operator.last_heartbeats(), set(self._members) - self._check_excluded()
            connected = fresh(heartbeats) & members
            back = {name for name, since in self._gone_since.items() if heartbeats.get(name, 0.0) > since} & connected
            silent = self._silent_since(silent, connected, progress, polled)
            back |= {name for name, since in silent.items() if polled - since > STUCK}
            stalled = len(agents - set(self._gone_since)) < self.spec.terms.min_agents
            if coming := self._to_readmit(back | (connected - agents), stalled):
                self.run_folder.log("membership", agents=coming)
                return False

    def _silent_since(
        self, before: dict[str, float], connected: set[str], progress: dict[str, Any], now: float
    ) -> dict[str, float]:
        """When each connected agent that missed a deadline was first seen silent; its process may hang."""
        lost = {name for name, word in progress.get("agents", {}).items() if word == "lost"}
        return {name: before.get(name, now) for name in lost & connected}

    def _lost(self, job: str, generation: int) -> bool:
        """Note that a job ended; return whether the run is finished."""
        now = self.run_folder.progress()
        phase = now.get("phase") if now.get("generation") == generation else None
        if phase not in ("finished", TRAINED):
            self.run_folder.log("job lost", job=job)
        return phase == "finished"

    def _to_readmit(self, idle: set[str], stalled: bool = False) -> list[str]:
        """The idle agents to take in with a new job; the interval doubles for an agent that does not stay.

        If no round is possible without them, a new job disturbs nobody.
        """
        now, coming = time.monotonic(), []
        for name in sorted(idle):
            tries, last = self._admissions.get(name, (0, -math.inf))
            if stalled or now - last > READMIT * 2**tries:
                self._admissions[name] = tries + 1, now
                coming.append(name)
        return coming

    def _check_progress(self) -> None:
        """Raise an error after too many jobs without a round, or if the disk is full."""
        progress = self.run_folder.progress()
        now = progress.get("round", -1)
        if self.jobs == self._counted:
            return
        self._fruitless = 0 if now != self._round else self._fruitless + 1
        self._round, self._counted = now, self.jobs
        if self._fruitless >= MOST_FRUITLESS:
            why = progress.get("error", "see the logs in the folder `server`")
            raise UserError(f"{self._fruitless} jobs ended without a round: {why}")
        if shutil.disk_usage(self.run_folder.path).free < LEAST_DISK:
            raise UserError(f"the disk is full: {self.run_folder.path}; the last checkpoint is intact")

"""The server's side of a run, whatever carries its messages: what to send, what to take, what to keep."""

import time
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from perfedrl.compilation import jit
from perfedrl.errors import UserError
from perfedrl.experiments.files import named_leaves
from perfedrl.experiments.provenance import provenance
from perfedrl.experiments.store import has_run, load_run, save_run
from perfedrl.federation.frames import Frame, encode
from perfedrl.federation.server import checkpoint
from perfedrl.federation.server.agent_reports import epsilon_in, history_of, outcomes_in
from perfedrl.federation.server.answers import Answers, Ask, Taken, of_kind
from perfedrl.federation.server.network_config import config_of
from perfedrl.federation.server.run_folder import Control
from perfedrl.federation.server.upload_bound import hard_bound
from perfedrl.federation.server.upload_checks import Expected, Gate
from perfedrl.simulation.compiled import taking_part
from perfedrl.simulation.simulator import Simulation

PAUSE = 1.0
"""Seconds before a round is asked again that too few agents answered."""
SHOWN = 0.1
"""Seconds between two looks that an onlooker can take at a round under way."""


class Coordinator:
    """Takes a run from its last checkpoint to its end, by asking agents."""

    def __init__(self, folder: Path, generation: int):
        self.control, self.generation = Control(folder), generation
        with self.control.writing(generation):
            self.plan = self.control.plan()
        self.config = config_of(self.plan.config)
        self.terms, self.names = self.plan.terms, self.plan.agents
        self.gate = Gate(hard_bound(self.config), self.terms.factor, self.terms.strikes)
        self.round, self.server, self.history, self.seconds = 0, self._start(), None, 0.0
        if (saved := checkpoint.read(self.control.checkpoint, self.server)) is not None:
            if saved.run != self.plan.run:
                raise UserError(f"{self.control.checkpoint} is of another run, {saved.run}; start again with --restart")
            self.round, self.server, self.history = saved.round, saved.server, saved.history
            self.seconds = saved.seconds
            self.gate = Gate.recall({**saved.gate, "factor": self.terms.factor, "strikes": self.terms.strikes})
            for name in set(self.plan.released) & set(self.gate.quarantined) if generation == self.plan.since else ():
                self.gate.release(name)
        self.lost: set[str] = set()
        self.failing: set[str] = set()
        self.epsilon: float | None = None
        self.crossed = 0, 0
        self._began, self._shown, self._pace = time.monotonic() - self.seconds, 0.0, float("nan")

    @cached_property
    def simulation(self) -> Simulation:
        """The same run in one process: the start, and what a round costs."""
        parts, config = self.config.parts, self.config
        return Simulation(
            parts.fleet,
            parts.policy,
            [parts.algorithm],
            config.seeds,
            parts.agent,
            None,
            parts.evaluation,
            config.start,
            parts.weights,
            config.participation,
        )

    def _start(self) -> PyTree:
        return jax.tree.map(lambda x: np.asarray(x[0]), self.simulation.start().server)

    @property
    def due(self) -> bool:
        """Whether the run must be measured before it goes on."""
        measured = () if self.history is None else self.history.rounds
        return self.round in (0, *self.config.stops) and self.round not in measured

    def run(self, ask: Ask) -> None:
        """To the end. Ctrl-C, crashes and lost machines cost at most the round under way."""
        if self._saved():
            self._end()
            return
        self.control.say("start", generation=self.generation, round=self.round)
        self._prepare(ask)
        while self.due or self.round < self.config.rounds:
            if self.due:
                self._measure(ask)
                self._save()
            else:
                present = self._one_round(ask)
                self._save()
                about = {"agents": present, "generation": self.generation, "bytes": self.crossed}
                about |= {} if self.epsilon is None else {"epsilon": self.epsilon}
                self.control.say("round", round=self.round - 1, **about)
        self._personalize(ask)
        self._finish()

    def _question(self, kind: str, **fields: Any) -> bytes:
        about = {"run": self.plan.run, "generation": self.generation, "round": self.round, **fields}
        texts = {name: str(value) for name, value in about.items()}
        return encode(Frame(kind, {**texts, "plan": self.plan.config}, named_leaves(self.server.message)))

    def _ask(self, ask: Ask, kind: str, done: set[str], needed: int, **fields: Any) -> Answers:
        """Ask all who are neither done nor shut out; those who were silent the last time are not waited for."""
        without = done | set(self.gate.quarantined)
        waited = set(self.names) - without - self.lost

        def enough(answers: Answers) -> bool:
            self._look(kind, answers)
            answered = set(answers.frames) | set(answers.failures)
            return len(answers.frames) >= needed and waited & set(answers.asked) <= answered

        question = self._question(kind, **fields)
        answers = ask(kind, question, without, enough, self.terms.deadline)
        self.crossed = len(question), max(map(len, answers.frames.values()), default=0)
        self._notice(kind, answers)
        return answers

    def _notice(self, kind: str, answers: Answers) -> None:
        """Remember who was silent; log who began to fail, and who is back."""
        for name, reason in sorted(answers.failures.items()):
            if name not in self.failing:
                self.control.say("failure", agent=name, round=self.round, task=kind, reason=reason)
        for name in sorted(answers.silent - self.lost):
            self.control.say("silent", agent=name, round=self.round, task=kind)
        for name in sorted((self.lost | self.failing) & set(answers.frames)):
            self.control.say("back", agent=name, round=self.round, task=kind)
        self.failing = (self.failing | set(answers.failures)) - set(answers.frames)
        self.lost = (self.lost | answers.silent) - set(answers.frames) - set(answers.failures) - set(answers.late)

    def _prepare(self, ask: Ask) -> None:
        """Let every agent build and compile, so that no round waits for it."""
        self._until_enough(ask, "prepare", lambda answers: of_kind(answers, "prepared"))

    @property
    def _here(self) -> set[str]:
        """Who takes part in this round, as the simulator would draw it."""
        drawn, of = self.simulation.present, len(self.names)
        return {self.names[i] for i in taking_part(self.config.seeds[0], self.round, of, drawn).tolist()}

    def _one_round(self, ask: Ask) -> list[str]:
        """Ask for uploads and take the server's step; who took part, in the fleet's order."""
        began = time.monotonic()
        sent = named_leaves(self.config.parts.algorithm.unchanged_upload(self.server.message))
        expected = Expected(self.plan.run, self.generation, self.round, sent)
        here = self._here

        def taken(answers: Answers) -> tuple[dict[str, Any], dict[str, str]]:
            verdict = self.gate.judge(expected, {n: f for n, f in answers.frames.items() if n in here})
            for name, reason in sorted(verdict.refused.items()):
                self.control.say("refused", agent=name, round=self.round, reason=reason)
            for name in verdict.quarantined:
                self.control.say("quarantined", agent=name, round=self.round)
            if self.config.privacy is not None:
                self._account(answers.frames[name] for name in verdict.accepted)
            return verdict.accepted, verdict.refused

        accepted = self._until_enough(ask, "update", taken, here=here)
        present = [name for name in self.names if name in accepted]
        self._step(present, accepted)
        self.round += 1
        self._pace = time.monotonic() - began
        return present

    def _step(self, present: list[str], accepted: dict[str, dict[str, np.ndarray]]) -> None:
        """The server's part of a round."""
        tree, leaves = jax.tree.structure(self.server.message), list(named_leaves(self.server.message))
        stacked = [np.stack([accepted[name][leaf] for name in present]) for leaf in leaves]
        weights = self._weights[[self.names.index(name) for name in present]]
        server = _server(self.config.parts.algorithm, self.server, jax.tree.unflatten(tree, stacked), weights)
        self.server = jax.tree.map(np.asarray, server)
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(self.server)):
            raise UserError(f"training diverged in round {self.round}: lower alpha or beta")

    @cached_property
    def _weights(self) -> np.ndarray:
        said = self.config.parts.weights
        return np.asarray(np.ones(len(self.names)) if said is None else said, np.float32)

    def _until_enough(
        self, ask: Ask, kind: str, taken: Taken, everybody: bool = False, here: set[str] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Ask until enough agents gave an answer that is taken, and return what was taken, by agent.

        Only those who are `here` are asked, and all of these are enough. Who has answered is not asked again. Where it
        matters that everybody does, those who fail have until the deadline to come back.
        """
        began, accepted = time.monotonic(), dict[str, Any]()
        settled = set[str]() if here is None else set(self.names) - here
        needed = min(self.terms.min_agents, len(self.names) - len(settled))
        while True:
            answers = self._ask(ask, kind, set(accepted) | settled, needed - len(accepted), **fields)
            more, refused = taken(answers)
            accepted |= more
            settled |= {name for name in refused if kind == "prepare" or not of_kind(answers, "error")[0].get(name)}
            waited = time.monotonic() - began
            hopeful = everybody and answers.failures and waited < self.terms.deadline
            if len(accepted) >= needed and not hopeful:
                return accepted
            possible = set(self.names) - settled - set(self.gate.quarantined)
            if len(possible) < needed or (waited > self.terms.patience and not hopeful):
                raise UserError(self._too_few(kind, needed, accepted, {**answers.failures, **refused}))
            if not hopeful:
                self.control.say("repeated", round=self.round, task=kind, agents=sorted(accepted))
            time.sleep(PAUSE)

    def _too_few(self, kind: str, needed: int, accepted: Iterable[str], why: dict[str, str]) -> str:
        came = len(list(accepted))
        reasons = "".join(f"; {name}: {reason}" for name, reason in sorted(why.items()))
        go_on = f"; with --min-agents {came} the run would go on" if came else ""
        return f"round {self.round}: {came} of the {needed} agents that are needed answered {kind!r}{reasons}{go_on}"

    def _account(self, frames: Iterable[bytes]) -> None:
        """The largest privacy loss that an agent reports of itself."""
        losses = [said for data in frames if (said := epsilon_in(data)) is not None]
        self.epsilon = max(losses) if losses else self.epsilon

    def _measure(self, ask: Ask) -> None:
        """What the agents say of the initialization, each before and after its own adaptation; an agent may decline."""
        last = self.round == self.config.rounds
        answers = self._until_enough(ask, "evaluate", lambda answers: (answers.frames, {}), everybody=last)
        said = {name: found for name in self.names if (found := outcomes_in(answers.get(name))) is not None}
        now = history_of(said, self.names, self.round, self.simulation)
        self.history = now if self.history is None else self.history.extend(now)

    def _personalize(self, ask: Ask) -> None:
        """Every agent turns the initialization into its own policy, which it keeps; it reports what that is worth."""
        if not self.terms.personalize:
            return
        about: dict[str, Any] = {"m": self.terms.personalize, "draw": 0}
        answers = self._until_enough(ask, "personalize", lambda answers: (answers.frames, {}), True, **about)
        for name in self.names:
            if (said := outcomes_in(answers.get(name), "personalized")) is not None:
                self.control.say("personalized", agent=name, **said)

    def _save(self) -> None:
        self.seconds = time.monotonic() - self._began
        seed = self.config.seeds[0]
        standing = checkpoint.Checkpoint(
            self.plan.run, seed, self.round, self.server, self.history, self.gate.memory(), self.seconds
        )
        with self.control.writing(self.generation):
            checkpoint.write(self.control.checkpoint, standing)

    def _finish(self) -> None:
        about = {**provenance(self.seconds), "federation": {"run": self.plan.run, "agents": list(self.names)}}
        message = jax.tree.map(lambda x: x[None], self.server.message)
        assert self.history is not None
        with self.control.writing(self.generation):
            save_run(Path(self.plan.runs), self.config, self.history, None, message, about)
        self.control.say("finished", round=self.round)
        self._end()

    def _end(self) -> None:
        """Nothing is half done any more; said last, since onlookers act on it."""
        self.control.checkpoint.unlink(missing_ok=True)
        self._show("finished")

    def _saved(self) -> bool:
        """Whether an earlier job of this run came to its end, and died before it could say so."""
        if not has_run(Path(self.plan.runs), self.config):
            return False
        about = load_run(Path(self.plan.runs) / self.config.folder).provenance
        return about.get("federation", {}).get("run") == self.plan.run

    def _look(self, kind: str, answers: Answers) -> None:
        if time.monotonic() - self._shown > SHOWN:
            self._show(kind, answers)

    def _show(self, phase: str, answers: Answers | None = None, **more: Any) -> None:
        self._shown = time.monotonic()
        state = {name: self._state_of(name, answers) for name in self.names}
        known = [] if self.history is None else [x for x in self.history.after[0, -1] if np.isfinite(x)]
        last = float(np.mean(known)) if known else None
        about = {"run": self.plan.run, "generation": self.generation, "round": self.round}
        pace = None if np.isnan(self._pace) else self._pace
        about |= {"rounds": self.config.rounds, "phase": phase, "agents": state, "objective": last}
        self.control.show({**about, "seconds_per_round": pace, "epsilon": self.epsilon, "time": time.time(), **more})

    def _state_of(self, name: str, answers: Answers | None) -> str:
        if name in self.gate.quarantined:
            return "quarantined"
        if answers is None:
            return "lost" if name in self.lost else "in"
        if name not in answers.asked:
            return "away"
        failed = "failed" if name in answers.failures else "lost" if name in self.lost else "waiting"
        return "in" if name in answers.frames else failed


def failed(control: Control, generation: int, error: Exception) -> None:
    """Say why a run cannot go on; what a person can mend is one sentence."""
    mendable = isinstance(error, UserError)
    why = str(error) if mendable else f"{type(error).__name__}: {error}"
    now = {"generation": generation, "phase": "failed", "error": why, "mendable": mendable}
    control.show({**control.progress(), **now})
    control.say("failed", reason=why)


def _server_step(algorithm: Any, state: PyTree, uploads: PyTree, weights: Any) -> PyTree:
    return algorithm.server(state, uploads, weights)


_server = jit(_server_step)

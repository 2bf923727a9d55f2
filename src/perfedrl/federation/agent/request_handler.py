"""An agent's answers to the server's requests: one frame in, one frame out, one request at a time."""

import os
import re
import resource
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from perfedrl.errors import UserError
from perfedrl.experiments.build import Privacy
from perfedrl.experiments.files import named_leaves
from perfedrl.federation.agent.answer_store import MOST_ROUNDS, Answer, AnswerStore, Counted, check_releases
from perfedrl.federation.agent.config import AgentConfig
from perfedrl.federation.agent.privacy_ledger import PrivacyLedger
from perfedrl.federation.agent.worker import AgentOutcomes, LocalTraining, Tensors, Worker, unnamed
from perfedrl.federation.environment_report import PLAN_TABLE
from perfedrl.federation.frames import COUNTED, FAILED_EPISODES, NEVER, Frame, digest
from perfedrl.saved_policies.file import encode as policy_file
from perfedrl.types import Params

LONGEST_MESSAGE = 1000
COUNTED_ROUND = re.compile(r"-1|[0-9]{1,10}")


class Agent:
    """An agent's worker and store behind requests. One request is processed at a time; "health" is answered at once.

    `tell` is called with a sentence for every request that the agent has processed.
    """

    def __init__(self, config: AgentConfig, number: int, folder: Path, tell: Callable[[str], None] = lambda _: None):
        self.worker, self.store, self._listener = Worker(config, number), AnswerStore(folder, number), tell
        self.ledger = PrivacyLedger(self.store, config.privacy)
        if config.privacy is not None:
            self.tell(f"uploads with noise only: {self.ledger.told()}")
        self._lock = threading.Lock()
        self._paid: tuple[str, float | None, float] | None = None
        """The entry of the ledger for an upload that could not be stored: it was not sent, so the next try has it."""
        self._current = {"run": "", "round": ""}
        self._handlers: Mapping[str, Callable[[Frame], Frame]] = {
            "describe": self._describe,
            "prepare": self._prepare,
            "update": self._update,
            "evaluate": self._evaluate,
            "personalize": self._personalize,
        }

    @property
    def busy(self) -> bool:
        """Whether a request is being processed."""
        return self._lock.locked()

    def close(self) -> None:
        """Close the environment, unless a request is being processed, which uses it."""
        if self._lock.acquire(blocking=False):
            try:
                self.worker.close()
            finally:
                self._lock.release()

    def tell(self, what: str) -> None:
        """Say in one line what the agent did; a closed terminal is no reason to fail."""
        with suppress(OSError):
            self._listener(one_line(what))

    def answer(self, frame: Frame) -> Frame:
        """Answer a request; errors are answers too, of one sentence."""
        try:
            if frame.kind == "health":
                return self._health()
            if frame.kind not in self._handlers:
                raise UserError(f"expected a request health, {', '.join(self._handlers)}, got {frame.kind[:40]!r}")
            with self._working(frame):
                return self._handlers[frame.kind](frame)
        except UserError as error:
            self.tell(f"{frame.kind[:40]!r} failed: {error}")
            return failure(str(error))
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.tell(f"{frame.kind[:40]!r} failed: {type(error).__name__}: {error}")
            return failure(f"the agent failed to process {frame.kind[:40]!r}: {type(error).__name__}, see its log")

    @contextmanager
    def _working(self, frame: Frame):
        """Hold the lock, and remember the request for "health"."""
        with self._lock:
            self._current = {name: frame.fields.get(name, "")[:100] for name in self._current}
            yield

    def _health(self) -> Frame:
        fields = {"name": f"agent-{self.worker.number}", "pid": str(os.getpid()), "version": version("perfedrl")}
        fields |= {**self._current, "busy": "yes" if self.busy else "no", "rss": str(resident())}
        return Frame("health", fields | {"env": self.worker.config.env})

    def _describe(self, frame: Frame) -> Frame:
        """Report the sizes and names of the agent's environment; empty if it is a sampler, which fits any."""
        run, generation = text(frame, "run"), count(frame, "generation")
        self.store.record_for(run, generation, {})  # raises if the generation is stale
        report = self.worker.config.report(self.worker.number)
        self.tell(f"joined the run {run}, and described its environment")
        described = "" if report is None else report.model_dump_json()
        return Frame("described", {"run": run, "generation": str(generation), PLAN_TABLE: described})

    def _prepare(self, frame: Frame) -> Frame:
        run, generation, begun = text(frame, "run"), count(frame, "generation"), time.monotonic()
        training, _ = self._training(frame)
        self.store.join(run, generation, named_leaves(training.state))
        training.prepare()
        seconds = f"{time.monotonic() - begun:.6f}"
        about = {"seconds": seconds, "trajectories": str(training.trajectories)}
        self.tell(f"ready for {training.config.rounds} rounds of {training.config.name}")
        return Frame("prepared", {"run": run, "generation": str(generation), **about})

    def _update(self, frame: Frame) -> Frame:
        run, generation, round_ = text(frame, "run"), count(frame, "generation"), count(frame, "round")
        begun = time.monotonic()
        training, message = self._training(frame)
        table = training.config.privacy
        clip, noise = (None, 0.0) if table is None else (table.clip, table.noise)

        def compute(tensors: Tensors) -> tuple[Tensors, Tensors]:
            state = unnamed(training.state, tensors, f"the stored state of {run}")
            paid = self._paid == (run, clip, noise)
            if not paid:
                self.ledger.check_budget(noise)
            upload, after = training.update(message, state, round_)
            if not paid:
                self.ledger.record(run, clip, noise)  # before the store has the upload
            self._paid = run, clip, noise
            return named_leaves(upload), named_leaves(after)

        counted = self._counted(frame, training)
        known = () if counted is None else (str(counted.round),)
        identity = digest(frame.tensors, text(frame, "plan"), *known)
        before, start = self.ledger.noised(run), named_leaves(training.state)
        noised = before if noise > 0 else None
        check_releases(run, before, noised)
        if training.algorithm.asynchronous and counted is not None:
            waiting = self.store.waiting(run, generation, round_, counted)
            round_ = round_ if waiting is None else waiting.round
            identity = identity if waiting is None else waiting.digest
        answer = self.store.answer(run, generation, round_, identity, start, compute, noised, counted)
        self._paid = None
        spent, seconds = training.trajectories if answer.fresh else 0, time.monotonic() - begun
        about = {"seconds": f"{seconds:.6f}", "trajectories": str(spent)}
        if answer.fresh and training.failed_episodes and table is None:  # noise does not cover the count
            about[FAILED_EPISODES] = str(training.failed_episodes)
        loss = self.ledger.told(None if table is None else table.delta)
        self.tell(told_of_round(training, round_, answer, seconds) + (loss and f", {loss}"))
        asked = {"run": run, "generation": str(generation), "round": str(round_)}
        return Frame("upload", {**asked, **about, **self._privacy_fields(table)}, answer.upload)

    def _privacy_fields(self, table: Privacy | None) -> dict[str, str]:
        """The number of noised uploads and the privacy loss of the agent's lifetime, at the plan's delta.

        The loss only with the accounting library; nothing where the plan has no privacy.
        """
        if table is None:
            return {}
        fields = {"privacy_releases": str(self.ledger.noised())}
        with suppress(UserError):
            fields["epsilon"] = repr(self.ledger.loss(table.delta))
        return fields

    def _evaluate(self, frame: Frame) -> Frame:
        run, generation, round_ = text(frame, "run"), count(frame, "generation"), count(frame, "round")
        if not self.worker.config.tells_outcomes:
            raise UserError(
                "this agent does not report outcomes (tell_outcomes = false, which is the default with [privacy])"
            )
        training, message = self._training(frame)
        start, counted = named_leaves(training.state), self._counted(frame, training)
        state = self._state(training, run, self.store.state(run, generation, round_, start, counted))
        outcomes = training.evaluate(message, state, round_)
        self.tell(f"measured after {round_} of {training.config.rounds} rounds: {told_of_returns(outcomes)}")
        return Frame("outcomes", {"run": run, "generation": str(generation), "round": str(round_)}, scalars(outcomes))

    def _personalize(self, frame: Frame) -> Frame:
        run, m, draw = text(frame, "run"), count(frame, "m"), count(frame, "draw", "0")
        path = self.store.path(run, "personal")
        if frame.fields.get("parameters") == "yes" and self.worker.config.privacy is not None:
            raise UserError("this agent uploads with noise only: its own parameters stay here")
        training, message = self._training(frame)
        stored = self.store.stored(run)
        if stored is not None and "generation" in frame.fields:
            self.store.record_for(run, count(frame, "generation"), {})  # raises if the generation is stale
        state = training.state
        if stored is not None:
            counted = self._counted(frame, training)
            found = None if counted is None else stored.state_after(counted.round)
            state = self._state(training, run, stored.after if found is None else found)
        own, outcomes = training.personalize(message, state, m, draw)
        worse = outcomes.after["return"] < outcomes.before["return"]
        kept = "start" if worse and self.worker.config.keep == "better" else "adapted"
        if kept == "start":
            own = training.start(message, state)
        about = {"run": run, "m": str(m), "draw": str(draw), "number": str(self.worker.number)}
        how = {"trajectories": m, "draw": draw}
        self.store.write(path, self._policy_file(training, own, run, outcomes, kept, how))
        which = "the shared policy is kept" if kept == "start" else "saved"
        self.tell(f"personalized with {m} trajectories: {told_of_returns(outcomes)}; {which} in {path}")
        self.worker.close()  # the run is over for this agent
        tensors = scalars(outcomes) if self.worker.config.tells_outcomes else {}
        if frame.fields.get("parameters") == "yes":
            tensors |= {f"parameters.{name}": x for name, x in named_leaves(own).items()}
        return Frame("personalized", about, tensors)

    def _policy_file(
        self, training: LocalTraining, own: Params, run: str, outcomes: AgentOutcomes, kept: str, how: Mapping[str, int]
    ) -> bytes:
        """The agent's own policy as `perfedrl.load_policy` opens it."""
        returns = {"return_before": outcomes.before["return"], "return_after": outcomes.after["return"]}
        adaptation = {"agent": f"agent {self.worker.number}", "run": run, **how}
        about: dict[str, Any] = {**adaptation, **returns, "kept": kept}
        about["adaptations"] = [adaptation] if kept == "adapted" else []
        about |= {"fleet": self.worker.config.fleet, "algorithm": training.config.algorithm}
        return policy_file(
            training.config.experiment.policy.description, named_leaves(own), self.worker.environment_spaces, about
        )

    def _training(self, frame: Frame) -> tuple[LocalTraining, Any]:
        """The training that a request's plan describes, and the request's message, which must fit it."""
        training = self.worker.training(text(frame, "plan"))
        return training, unnamed(training.message, dict(frame.tensors), "the message")

    def _counted(self, frame: Frame, training: LocalTraining) -> Counted | None:
        """The last of this agent's uploads that the server counted, of those of all agents; None if it does not say."""
        if COUNTED not in frame.fields:
            return None
        rounds, number = frame.fields[COUNTED].split(), self.worker.number
        said = rounds[number] if number < len(rounds) else str(NEVER)
        if not COUNTED_ROUND.fullmatch(said) or not NEVER <= int(said) < MOST_ROUNDS:
            raise UserError(f"{COUNTED} must be rounds, or {NEVER} for none, got {said[:40]!r}")
        return Counted(int(said), training.algorithm.remembers_uploads)

    def _state(self, training: LocalTraining, run: str, tensors: Tensors) -> Any:
        return unnamed(training.state, tensors, f"the stored state of {run}")


def told_of_round(training: LocalTraining, round_: int, answer: Answer, seconds: float) -> str:
    """What the agent did in a round, in one line."""
    of_all = f"round {round_ + 1} of {training.config.rounds}"
    uploaded = f"uploaded {sum(x.nbytes for x in answer.upload.values())} bytes"
    if not answer.fresh:
        return f"{of_all}: {uploaded} again, nothing new was played"
    mean = "" if training.mean_return is None else f"mean return {training.mean_return:.4g}, "
    n = training.failed_episodes
    failed = f"{n} failed and {'was' if n == 1 else 'were'} drawn again, " if n else ""
    return f"{of_all}: played {training.trajectories_in(round_)} episodes, {failed}{mean}{seconds:.2f} s, {uploaded}"


def told_of_returns(outcomes: AgentOutcomes) -> str:
    """Returns before and after adaptation, in a few words; a loss is told."""
    before, after = outcomes.before["return"], outcomes.after["return"]
    return f"return {before:.4g} before adaptation, {'only ' if after < before else ''}{after:.4g} after"


def failure(message: str) -> Frame:
    """An error as an answer, in one line."""
    return Frame("error", {"message": one_line(message)})


def one_line(message: str) -> str:
    """A message as one printable line."""
    return " ".join("".join(c if c.isprintable() else " " for c in message).split())[:LONGEST_MESSAGE]


def text(frame: Frame, name: str) -> str:
    """A required field of a request."""
    if name not in frame.fields:
        raise UserError(f"a request {frame.kind!r} needs the field {name!r}")
    return frame.fields[name]


def count(frame: Frame, name: str, default: str | None = None) -> int:
    """A field of a request that must be a whole number."""
    value = text(frame, name) if default is None else frame.fields.get(name, default)
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        raise UserError(f"{name} must be a whole number, got {value[:40]!r}")
    return int(value)


def scalars(outcomes: AgentOutcomes) -> Tensors:
    """Outcomes by name, e.g. "before.return"."""
    both = outcomes._asdict().items()
    return {f"{when}.{name}": np.asarray(x, np.float64) for when, named in both for name, x in named.items()}


def resident() -> int:
    """Resident memory of this process in bytes; the peak where the system does not report the current value."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

"""The state machine of a networked run: a state and the agents' answers give the next state and some commands.

Pure: no files, no network, no clock. `coordinator.Coordinator` carries out the commands and measures the time.
The only program that is compiled here is the algorithm's own server step.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from perfedrl.compilation import jit
from perfedrl.errors import UserError
from perfedrl.experiments.config import Config
from perfedrl.experiments.files import named_leaves
from perfedrl.federation.frames import COUNTED, NEVER, Frame, encode
from perfedrl.federation.server.answers import (
    Answers,
    epsilon_in,
    failed_episodes_in,
    history_of,
    largest_return,
    of_kind,
    outcomes_in,
    outlier,
    unbelievable,
)
from perfedrl.federation.server.asynchronous_rounds import UploadArrival, round_in, uploads_by_round
from perfedrl.federation.server.commands import Announce, Command, Fail, Finish, HandOver, Log, Pause, Question, Save
from perfedrl.federation.server.opposition import ROUNDS_IN_A_ROW, alignments, counted, opposing
from perfedrl.federation.server.run_folder import TRAINED, RunSpec, ServerCheckpoint
from perfedrl.federation.server.upload_bound import hard_bound
from perfedrl.federation.server.upload_checks import Expected, Gate, UploadVerdict
from perfedrl.simulation.best_state import best_evaluation
from perfedrl.simulation.history import History
from perfedrl.simulation.keys import draw_participants

# --- state --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CoordinatorState:
    """The state of a run: what a checkpoint keeps, what is known of the agents, and the open question.

    `lost` agents were silent when last asked, and are not waited for until they answer; `failing` agents reported a
    failure. Of the open question, `accepted` holds the answers taken so far, and `settled` the agents that are not
    asked again: those that sit the round out, and those whose answer was rejected. The job began at round `began`;
    `opposed` counts since then the rounds in a row in which an agent's upload pointed against all others. `counted` has
    the last round whose upload entered the server's state, for each agent that has such a round; of asynchronous
    agents, the last that was received. `since` has the rounds of the `accepted` uploads, and `arrivals` those of all
    uploads of asynchronous agents that entered the server's state. `best` is the message of the best evaluation, if the
    run keeps it.
    """

    round: int
    server: PyTree
    history: History | None
    gate: Gate
    epsilon: float | None = None
    lost: frozenset[str] = frozenset()
    failing: frozenset[str] = frozenset()
    phase: str = "prepare"
    accepted: Mapping[str, Any] = field(default_factory=dict)
    settled: frozenset[str] = frozenset()
    needed: int = 0
    question: Question | None = None
    began: int = 0
    opposed: Mapping[str, int] = field(default_factory=dict)
    counted: Mapping[str, int] = field(default_factory=dict)
    since: Mapping[str, int] = field(default_factory=dict)
    arrivals: tuple[UploadArrival, ...] = ()
    best: PyTree | None = None


Transition = tuple[CoordinatorState, list[Command]]


# --- transitions --------------------------------------------------------------------------------------------------


class RunStateMachine:
    """The transitions of one run: `begin` gives the first question, `answered` follows each one.

    The phases are "prepare" (agents compile), "update" (one per round), "evaluate" (before the first round and after
    those that the config names), "personalize" (if the terms ask for it; newcomers too) and "finished". If there are
    newcomers, a job that trains ends as "trained", and the next job begins with "prepare" and "personalize". `plan` is
    what agents are sent of the run, by default its config.
    """

    def __init__(self, config: Config, spec: RunSpec, generation: int, plan: str | None = None):
        self.config, self.spec, self.generation = config, spec, generation
        self.plan = spec.config if plan is None else plan
        self.experiment, self.terms, self.names = config.experiment, spec.terms, spec.agents

    @cached_property
    def start(self) -> PyTree:
        """The server's state before round 0."""
        with self.experiment.precision:
            server, _ = self.experiment.initial_states(self.experiment.start_number(self.config.seeds[0]))
        return jax.tree.map(np.asarray, server)

    @cached_property
    def largest_answer(self) -> int:
        """The size in bytes of the largest answer that an agent of this run can give, which is an upload."""
        unchanged = self.experiment.algorithm.unchanged_upload(self.start.message)
        return Expected(self.spec.run, self.generation, 0, named_leaves(unchanged)).limit

    def begin(self, saved: ServerCheckpoint | None = None) -> Transition:
        """Start a new run, or continue one from its checkpoint; agents compile before the first round."""
        if saved is None:
            gate = Gate(hard_bound(self.config), self.terms.factor, self.terms.strikes)
            state = CoordinatorState(0, self.start, None, gate)
        else:
            gate = Gate.restore({**saved.gate, "factor": self.terms.factor, "strikes": self.terms.strikes})
            released = self.spec.released if self.generation == self.spec.since else ()
            for name in set(released) & set(gate.quarantined):
                gate.release(name)
            state = CoordinatorState(
                *(saved.round, saved.server, saved.history, gate),
                began=saved.round,
                counted=saved.counted,
                arrivals=tuple(UploadArrival(*x) for x in saved.arrivals),
                best=saved.best,
            )
        started = Log("start", {"generation": self.generation, "round": state.round})
        state, question = self._enter(state, "prepare")
        return state, [started, question]

    def answered(self, state: CoordinatorState, answers: Answers, waited: float) -> Transition:
        """Process the answers to the open question, `waited` seconds after it was asked for the first time."""
        state, commands = self._note_agents(state, answers)
        known = state.counted
        state, refused, told = self._take(state, answers)
        commands += told
        everything = replace(answers, frames={**answers.late_uploads, **answers.frames})
        errors = of_kind(everything, "error")[0] if refused else {}
        settled = {name for name in refused if state.phase == "prepare" or name not in errors}
        state = replace(state, settled=state.settled | settled)
        last = state.phase == "personalize" or (state.phase == "evaluate" and state.round == self.config.rounds)
        # The last answers of a run matter for everybody: failed agents have until the deadline to come back.
        hopeful = bool(last and answers.failures and waited < self.terms.deadline)
        if self._came(state) >= state.needed and not hopeful:
            state, more = self._complete(state, answers)
            return state, commands + more
        possible = set(self.names) - state.settled - set(state.gate.quarantined)
        if len(possible) < state.needed or (waited > self.terms.patience and not hopeful):
            reason = self._too_few(state, {**answers.failures, **refused})
            return state, [*commands, Fail(reason)]
        if state.counted != known:  # asynchronous agents whose uploads were of no use begin anew
            state, question = self._ask(state)
            return state, [*commands, question]
        if not hopeful:
            repeated = {"round": state.round, "task": state.phase, "agents": sorted(state.accepted)}
            commands.append(Log("repeated", repeated))
        state, question = self._ask(state)
        return state, [*commands, Pause(), question]

    # --- questions

    def frame(self, state: CoordinatorState, kind: str, **fields: Any) -> bytes:
        """The encoded question of one kind: the run, its config, the server's message, and whose uploads it counts.

        An agent learns from `counted`, the last counted rounds in the agents' order, from which of its states to go on.
        """
        counted = " ".join(str(state.counted.get(name, NEVER)) for name in self.names)
        about = {"run": self.spec.run, "generation": self.generation, "round": state.round, COUNTED: counted, **fields}
        texts = {name: str(value) for name, value in about.items()}
        kept = kind == "personalize" and state.best is not None
        message = state.best if kept else state.server.message
        return encode(Frame(kind, {**texts, "plan": self.plan}, named_leaves(message)))

    def _enter(self, state: CoordinatorState, phase: str) -> tuple[CoordinatorState, Question]:
        """Open the first question of a phase; an update is asked of the agents that are drawn for the round."""
        absent = frozenset(self.names) - self._drawn(state) if phase == "update" else frozenset()
        least = 1 if self._waits_for_nobody(phase) else self.terms.min_agents
        needed = min(least, len(self.names) - len(absent))
        return self._ask(replace(state, phase=phase, accepted={}, since={}, settled=absent, needed=needed))

    def _waits_for_nobody(self, phase: str) -> bool:
        """Whether a question closes with its first answer: an update of asynchronous agents."""
        return phase == "update" and self.experiment.algorithm.asynchronous

    def _ask(self, state: CoordinatorState) -> tuple[CoordinatorState, Question]:
        """Ask everybody who is neither done nor in quarantine; agents that were silent before are not waited for."""
        fields = {"m": self.terms.personalize, "draw": 0} if state.phase == "personalize" else {}
        without = frozenset(state.accepted) | state.settled | set(state.gate.quarantined)
        without |= frozenset() if state.phase == "personalize" else frozenset(self.spec.newcomers)
        nobody = self._waits_for_nobody(state.phase)
        waited_for = frozenset(() if nobody else (*self.names, *self.spec.newcomers)) - without - state.lost
        frame = self.frame(state, state.phase, **fields)
        needed, uncounted = state.needed - self._came(state), frozenset(self.spec.newcomers)
        received = state.counted if nobody else None
        question = Question(state.phase, state.round, frame, without, waited_for, needed, uncounted, received)
        return replace(state, question=question), question

    def _came(self, state: CoordinatorState) -> int:
        """The number of accepted answers to the open question from agents that train."""
        return len(state.accepted.keys() & set(self.names))

    def _drawn(self, state: CoordinatorState) -> frozenset[str]:
        """The agents that take part in this round, drawn as the simulator draws them."""
        drawn = draw_participants(self.config.seeds[0], state.round, len(self.names), self.experiment.participants)
        return frozenset(self.names[i] for i in drawn.tolist())

    # --- answers

    def _note_agents(self, state: CoordinatorState, answers: Answers) -> tuple[CoordinatorState, list[Command]]:
        """Update which agents are lost or failing, and log those whose status changed."""
        known, about = set(answers.frames), {"round": state.round, "task": state.phase}
        failed = sorted(set(answers.failures) - state.failing)
        at_work = self._waits_for_nobody(state.phase)
        silent = [] if at_work else sorted(answers.silent - state.lost)
        back = sorted((state.lost | state.failing) & known)
        commands: list[Command] = [
            *(Log("failure", {"agent": name, **about, "reason": answers.failures[name]}) for name in failed),
            *(Log("silent", {"agent": name, **about}) for name in silent),
            *(Log("back", {"agent": name, **about}) for name in back),
        ]
        failing = (state.failing | set(answers.failures)) - known
        lost = (state.lost | set(silent)) - known - set(answers.failures) - set(answers.late)
        return replace(state, failing=frozenset(failing), lost=frozenset(lost)), commands

    def _take(
        self, state: CoordinatorState, answers: Answers
    ) -> tuple[CoordinatorState, dict[str, str], list[Command]]:
        """Accept or reject each answer; return the reasons of the rejections and what to log."""
        if state.phase == "update":
            return self._take_uploads(state, answers)
        taken: Mapping[str, Any] = answers.frames
        refused: dict[str, str] = {}
        if state.phase == "prepare":
            taken, refused = of_kind(answers, "prepared")
        return replace(state, accepted={**state.accepted, **taken}), refused, []

    def _take_uploads(
        self, state: CoordinatorState, answers: Answers
    ) -> tuple[CoordinatorState, dict[str, str], list[Command]]:
        """Check the uploads of the agents drawn for this round; the gate's record of them is part of the state."""
        drawn, gate = self._drawn(state), copy.deepcopy(state.gate)
        if self._waits_for_nobody(state.phase):
            return self._take_arrivals(replace(state, gate=gate), answers)
        uploads = {name: data for name, data in answers.frames.items() if name in drawn}
        verdict = gate.judge(self._expected(state, state.round), uploads)
        state = replace(state, gate=gate)
        return self._take_accepted(state, verdict, uploads, dict.fromkeys(verdict.accepted, state.round))

    def _take_arrivals(
        self, state: CoordinatorState, answers: Answers
    ) -> tuple[CoordinatorState, dict[str, str], list[Command]]:
        """Check the uploads of asynchronous agents that arrived; those that are too old are left out, without blame.

        Whatever becomes of an upload, it was received, and its agent begins a new one; an error is no upload.
        """
        both = {**answers.late_uploads, **answers.frames}
        ours = {name: data for name, data in both.items() if name in self.names}
        arrived = uploads_by_round(ours, state.counted, state.round)
        refused, since = dict[str, str](), dict[str, int]()
        commands: list[Command] = []
        for round_, uploads in arrived.items():
            since |= {name: round_ for name, data in uploads.items() if round_in(data) == round_}
            if round_ < state.round - self.terms.staleness:
                commands += [Log("stale", {"agent": x, "round": state.round, "since": round_}) for x in sorted(uploads)]
                continue
            verdict = state.gate.judge(self._expected(state, round_), uploads)
            state, reasons, told = self._take_accepted(state, verdict, uploads, dict.fromkeys(verdict.accepted, round_))
            refused |= reasons
            commands += told
        return replace(state, counted={**state.counted, **since}), refused, commands

    def _expected(self, state: CoordinatorState, round_: int) -> Expected:
        """What an upload must look like that was computed from the message of a round."""
        algorithm = self.experiment.algorithm
        unchanged = algorithm.unchanged_upload(state.server.message)
        measured, kind = frozenset(named_leaves(algorithm.measured_part(unchanged))), round_ % algorithm.upload_cycle
        whole = algorithm.remembers_uploads or algorithm.asynchronous  # else agents, or a replay, would not know of it
        return Expected(self.spec.run, self.generation, round_, named_leaves(unchanged), measured, kind, whole)

    def _take_accepted(
        self,
        state: CoordinatorState,
        verdict: UploadVerdict,
        uploads: Mapping[str, bytes],
        since: Mapping[str, int],
    ) -> tuple[CoordinatorState, dict[str, str], list[Command]]:
        """Add the accepted uploads to the state; return the reasons of the rejections and what to log."""
        commands: list[Command] = [
            Log("refused", {"agent": name, "round": state.round, "reason": reason})
            for name, reason in sorted(verdict.refused.items())
        ]
        commands += [
            Log("clipped", {"agent": name, "round": state.round, "factor": factor})
            for name, factor in sorted(verdict.clipped.items())
        ]
        commands += [Log("quarantined", {"agent": name, "round": state.round}) for name in verdict.quarantined]
        failed = {name: failed_episodes_in(uploads[name]) for name in sorted(verdict.accepted)}
        commands += [
            Log("failed episodes", {"agent": name, "round": state.round, "count": n}) for name, n in failed.items() if n
        ]
        epsilon = state.epsilon
        if self.config.privacy is not None:
            epsilon = largest_epsilon((uploads[name] for name in verdict.accepted), epsilon)
        accepted, since = {**state.accepted, **verdict.accepted}, {**state.since, **since}
        return replace(state, epsilon=epsilon, accepted=accepted, since=since), verdict.refused, commands

    def _too_few(self, state: CoordinatorState, why: Mapping[str, str]) -> str:
        """The error for a question that too few agents answered."""
        came = self._came(state)
        reasons = "".join(f"; {name}: {reason}" for name, reason in sorted(why.items()))
        advice = f"; to continue with fewer, use --min-agents {came}" if came else ""
        return (
            f"round {state.round}: expected answers to {state.phase!r} from {state.needed} agents, "
            f"got {came}{reasons}{advice}"
        )

    # --- ends of phases

    def _complete(self, state: CoordinatorState, answers: Answers) -> Transition:
        """Use the accepted answers, and open the next question."""
        commands: list[Command] = []
        if state.phase == "update":
            try:
                state, commands = self._aggregate(state, answers)
            except UserError as error:
                return state, [Fail(str(error))]
        elif state.phase == "evaluate":
            state, commands = self._evaluate(state)
        elif state.phase == "personalize":
            commands = self._personalized(state)
        phase = self._next_phase(state)
        if phase in (TRAINED, "finished"):
            last = HandOver() if phase == TRAINED else Finish()
            return replace(state, phase=phase, question=None), [*commands, last]
        state, question = self._enter(state, phase)
        return state, [*commands, question]

    def _next_phase(self, state: CoordinatorState) -> str:
        """The phase after a complete one."""
        if state.phase == "personalize":
            return "finished"
        if self.evaluation_due(state):
            return "evaluate"
        if state.round < self.config.rounds:
            return "update"
        if not self.terms.personalize:
            return "finished"
        return TRAINED if self.spec.newcomers and state.began < self.config.rounds else "personalize"

    def evaluation_due(self, state: CoordinatorState) -> bool:
        """Whether the run is evaluated before its next round."""
        evaluated = () if state.history is None else state.history.rounds
        return state.round in (0, *self.config.stops) and state.round not in evaluated

    def _aggregate(self, state: CoordinatorState, answers: Answers) -> Transition:
        """Take the server's step with the accepted uploads, in the fleet's order."""
        accepted_names = [name for name in self.names if name in state.accepted]
        everybody = self.experiment.algorithm.asynchronous
        uploads, names = self._stacked(state), self.names if everybody else accepted_names
        server = jax.tree.map(np.asarray, self._step(state.server, uploads, self._weights(names)))
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(server)):
            raise UserError(f"training diverged in round {state.round}: lower alpha or beta")
        assert state.question is not None
        sizes = len(state.question.frame), max(map(len, answers.frames.values()), default=0)
        about = {"round": state.round, "agents": accepted_names, "generation": self.generation, "bytes": sizes}
        about |= {} if state.epsilon is None else {"epsilon": state.epsilon}
        opposed = self._opposed(state, accepted_names)
        newly = [name for name, count in opposed.items() if ROUNDS_IN_A_ROW == count > state.opposed.get(name, 0)]
        warnings = [Log("opposing", {"agent": name, "round": state.round, "rounds": ROUNDS_IN_A_ROW}) for name in newly]
        about |= {"since": [state.since[name] for name in accepted_names]} if everybody else {}
        now = [UploadArrival(state.round, i, state.since[x]) for i, x in enumerate(self.names) if x in state.since]
        arrivals = (*state.arrivals, *now) if everybody else ()
        received = {**state.counted, **state.since}
        after = {"server": server, "round": state.round + 1, "counted": received, "arrivals": arrivals}
        state = replace(state, **after, opposed=opposed)
        announced = () if self.evaluation_due(state) else (Announce(),)  # else the evaluation announces the round
        return state, [Save(), Log("round", about), *warnings, *announced]

    def _opposed(self, state: CoordinatorState, names: list[str]) -> dict[str, int]:
        """The rounds in a row, up to this one, in which agents' uploads pointed against all others."""
        expected = self._expected(state, state.round)
        moved = [
            np.stack([state.accepted[name][leaf] for name in names]) - x
            for leaf, x in expected.measured_part(expected.tensors).items()
        ]
        return counted(state.opposed, names, opposing(alignments(moved)))

    def _stacked(self, state: CoordinatorState) -> PyTree:
        """The accepted uploads, stacked in the fleet's order; zeros for asynchronous agents that are still at work."""
        algorithm = self.experiment.algorithm
        unchanged = algorithm.unchanged_upload(state.server.message)
        structure, leaves = jax.tree.structure(unchanged), named_leaves(unchanged)

        def upload(name: str) -> PyTree:
            tree = jax.tree.unflatten(structure, [state.accepted[name][leaf] for leaf in leaves])
            return algorithm.received(tree, state.since[name]) if algorithm.asynchronous else tree

        nothing = jax.tree.map(np.zeros_like, unchanged)
        names = [name for name in self.names if name in state.accepted or algorithm.asynchronous]
        uploads = [upload(name) if name in state.accepted else nothing for name in names]
        return jax.tree.map(lambda *xs: np.stack(xs), *uploads)

    def _step(self, server: PyTree, uploads: PyTree, weights: np.ndarray | None) -> PyTree:
        """The algorithm's step on the server, compiled where the simulator compiles it: then the bits are the same."""
        if self.experiment.fleet.traceable:
            return server_step(self.experiment.algorithm, server, uploads, weights)
        return _server_step(self.experiment.algorithm, *jax.tree.map(jnp.asarray, (server, uploads, weights)))

    def _weights(self, names: Sequence[str]) -> np.ndarray | None:
        """The weights of some agents; None if all are equal."""
        weights = self.experiment.weights
        return None if weights is None else np.asarray(weights, np.float32)[[self.names.index(name) for name in names]]

    def _evaluate(self, state: CoordinatorState) -> tuple[CoordinatorState, list[Command]]:
        """Add the agents' outcomes before and after their own adaptation to the history; agents may decline.

        Outcomes that cannot be true are left out, and an agent far from all others is named.
        """
        found = {name: outcomes_in(state.accepted.get(name)) for name in self.names}
        limit = largest_return(self.experiment.fleet.task(0))
        false = {name: why for name, said in found.items() if said and (why := unbelievable(said, limit))}
        reported = {name: said for name, said in found.items() if said is not None and name not in false}
        now = history_of(reported, self.names, state.round, self.experiment, self.config.seeds)
        if self.experiment.algorithm.asynchronous:  # agents have worked for so many rounds on average
            worked = len(state.arrivals) / len(self.names)
            costs = self.experiment.algorithm.trajectories_per_round, self.experiment.bytes_per_round
            trajectories, sent = (np.asarray([round(worked * cost)]) for cost in costs)
            now = replace(now, trajectories=trajectories, bytes=sent)
        far = outlier(dict(zip(self.names, now.after[0, 0].tolist(), strict=True))) if now.after.size else None
        logs = [Log("false outcomes", {"agent": x, "round": state.round, "reason": why}) for x, why in false.items()]
        logs += [] if far is None else [Log("outlier", {"agent": far, "round": state.round})]
        history = now if state.history is None else state.history.extend(now)
        best = state.best
        if self.config.keep == "best" and best_evaluation(history)[0] == len(history.rounds) - 1:
            best = state.server.message
        return replace(state, history=history, best=best), [*logs, Save(), Announce()]

    def _personalized(self, state: CoordinatorState) -> list[Command]:
        """Log the outcomes of each agent's own policy, which stays with the agent, and why others have none."""
        everybody = (*self.names, *self.spec.newcomers)
        found = {name: outcomes_in(state.accepted.get(name), "personalized") for name in everybody}
        answers = Answers(everybody, dict(state.accepted))
        failed, about = of_kind(answers, "personalized")[1], {"round": state.round, "task": state.phase}
        return [
            *(Log("personalized", {"agent": name, **said}) for name, said in found.items() if said is not None),
            *(Log("failure", {"agent": name, **about, "reason": reason}) for name, reason in failed.items()),
        ]


def largest_epsilon(frames: Iterable[bytes], otherwise: float | None) -> float | None:
    """The largest privacy loss that agents report or reported before."""
    losses = [loss for data in frames if (loss := epsilon_in(data)) is not None]
    return max([*losses, *([] if otherwise is None else [otherwise])], default=None)


def _server_step(algorithm: Any, state: PyTree, uploads: PyTree, weights: Any) -> PyTree:
    """The server's step; equal weights are constants of the compiled program, as in the simulator."""
    count = len(jax.tree.leaves(uploads)[0])
    return algorithm.server(state, uploads, jnp.ones(count) if weights is None else weights)


server_step = jit(_server_step)

"""A federation without a network: the server's coordinator asks agents in this process."""

import itertools

import numpy as np
from real_fleet import config

from perfedrl.federation.environment_report import PLAN_TABLE, EnvironmentReport
from perfedrl.federation.frames import Frame, decode, encode
from perfedrl.federation.server.answers import Answers
from perfedrl.federation.server.coordinator import Coordinator
from perfedrl.federation.server.run_folder import RunFolder, RunSpec, Terms

NAMES = ("agent-0", "agent-1", "agent-2")
CONFIG = config("asked", 4)
"""One config for most tests, so that the agents compile once."""
RUNS = itertools.count()
REPORT = EnvironmentReport(observation_size=4, actions=2, horizon=9, discount=0.99, outcomes=("score",))
"""What agents that answer without training report of their environments."""


class InProcessAgents:
    """Asks agents in this process. `trouble` maps (kind, round) to a function that changes the answers."""

    def __init__(self, agents, trouble=None):
        self.agents, self.trouble, self.asked = agents, trouble or {}, []

    def __call__(self, kind, frame, without, enough, deadline):
        question = decode(frame)
        names = [name for name in self.agents if name not in without]
        answers = Answers(asked=tuple(names))
        for name in names:
            answers.frames[name] = encode(self.agents[name].answer(question))
        self.asked.append((kind, int(question.fields["round"]), tuple(names)))
        self.trouble.get((kind, int(question.fields["round"])), lambda _: None)(answers)
        enough(answers)
        return answers


def silent(*names):
    """A trouble: the answers of some agents do not arrive in time, although the agents have computed them."""

    def trouble(answers):
        for name in names:
            del answers.frames[name]

    return trouble


def honest_answer(frame, generation=None, far=0.1):
    """A valid answer to a question, without training: an upload is the message plus `far`."""
    asked = decode(frame)
    fields = {name: asked.fields[name] for name in ("run", "generation", "round")}
    fields |= {} if generation is None else {"generation": str(generation)}
    if asked.kind == "update":
        return encode(Frame("upload", fields, {name: x + np.float32(far) for name, x in asked.tensors.items()}))
    if asked.kind == "describe":
        return encode(Frame("described", {**fields, PLAN_TABLE: REPORT.model_dump_json()}))
    kind = {"prepare": "prepared", "evaluate": "outcomes", "personalize": "personalized"}[asked.kind]
    outcomes = {f"{when}.return": np.asarray(1.5) for when in ("before", "after")} if kind != "prepared" else {}
    return encode(Frame(kind, fields, outcomes))


def ask_honest_agents(kind, frame, without, enough, deadline):
    """Ask agents that answer without training."""
    names = tuple(name for name in NAMES if name not in without)
    answers = Answers(names, {name: honest_answer(frame) for name in names})
    enough(answers)
    return answers


def new_run(folder, wanted=CONFIG, **terms):
    """The folder of a new run with some terms; the finished run will be in `folder / "runs"`."""
    run_folder = RunFolder(folder / "control")
    terms = Terms(**{"min_agents": 3, "deadline": 600.0, "patience": 600.0, "personalize": 0, **terms})
    run_folder.write_spec(RunSpec(f"run-{next(RUNS)}", wanted.to_toml(), NAMES, terms, str(folder / "runs")))
    return run_folder


def train(run_folder, agents, observers=()):
    """Train with a new job to its end."""
    Coordinator(run_folder.path, run_folder.next_generation(), observers).run(agents)

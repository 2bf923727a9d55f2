"""An engine whose agents live in the test's process, and plans of runs for it."""

import itertools

from real_fleet import config

from perfedrl.federation.frames import decode, encode
from perfedrl.federation.server.answers import Answers
from perfedrl.federation.server.run_folder import Control, Plan, Terms

NAMES = ("agent-0", "agent-1", "agent-2")
WANTED = config("asked", 4)
"""One config, so that the agents compile once."""


class Engine:
    """Asks agents in this process. `trouble` maps (kind, round) to a function that spoils the answers."""

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


RUNS = itertools.count()


def planned(folder, wanted=WANTED, **terms):
    control = Control(folder / "control")
    terms = Terms(**{"min_agents": 3, "deadline": 5.0, "patience": 3.0, "personalize": 0, **terms})
    control.write_plan(Plan(f"run-{next(RUNS)}", wanted.to_toml(), NAMES, terms, str(folder / "runs")))
    return control

"""Ask agents what their environments are like, and agree on one report for the run."""

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from perfedrl.errors import UserError
from perfedrl.federation.environment_report import MOST_OUTCOMES, PLAN_TABLE, EnvironmentReport, parsed_report
from perfedrl.federation.frames import Frame, encode
from perfedrl.federation.server.answers import Answers, AskAgents, of_kind
from perfedrl.federation.server.run_folder import RunFolder, RunSpec
from perfedrl.federation.server.upload_checks import printable

PAUSE = 1.0
"""Seconds before agents are asked again of which too few answered."""


def settled_report(folder: RunFolder, spec: RunSpec, generation: int, ask: AskAgents) -> EnvironmentReport:
    """The report that the run is built on: that of an earlier job, or the one that its agents agree on now."""
    saved = folder.report()
    if saved is not None:
        return parsed_report(saved)
    began = time.monotonic()
    while True:
        reports, refused, waiting = _ask(folder, spec, generation, ask)
        if len(reports) >= spec.terms.min_agents:
            break
        if not waiting or time.monotonic() - began > spec.terms.patience:
            reasons = "".join(f"; {name}: {reason}" for name, reason in sorted(refused.items()))
            needed, came = spec.terms.min_agents, len(reports)
            raise UserError(f"expected reports of environments from {needed} agents, got {came}{reasons}")
        time.sleep(PAUSE)
    agreed = agreement(reports, spec.terms.min_agents)
    for name, report in reports.items():
        if report is not None and not report.fits(agreed):
            folder.log("unlike", agent=name, reason=f"it has {report}; the others have {agreed}")
    folder.write_report(agreed.model_dump_json(), generation)
    return agreed


def _ask(
    folder: RunFolder, spec: RunSpec, generation: int, ask: AskAgents
) -> tuple[dict[str, EnvironmentReport | None], dict[str, str], bool]:
    """Ask once; return the reports, why other answers are none, and whether more may come."""
    about = {"run": spec.run, "generation": generation, "round": 0}
    frame = encode(Frame("describe", {name: str(value) for name, value in about.items()}))

    def enough(answers: Answers) -> bool:
        status: dict[str, Any] = {name: "in" if name in answers.frames else "waiting" for name in spec.agents}
        folder.write_progress({**about, "phase": "describe", "agents": status, "time": time.time()})
        return False

    answers = ask("describe", frame, set(spec.newcomers), enough, spec.terms.deadline)
    came, refused = of_kind(answers, "described")
    reports: dict[str, EnvironmentReport | None] = {}
    for name, answer in came.items():
        try:
            text = answer.fields.get(PLAN_TABLE, "")
            reports[name] = parsed_report(text) if text else None
        except UserError as error:
            refused[name] = printable(str(error))
    return reports, {**answers.failures, **refused}, len(reports) + len(refused) < len(spec.agents)


def agreement(reports: Mapping[str, EnvironmentReport | None], least: int) -> EnvironmentReport:
    """The report that most agents fit, with the outcomes that at least half of them have.

    Agents that report None fit any. If fewer than `least` agents fit, the error names those that do not.
    """
    given = {name: report for name, report in sorted(reports.items()) if report is not None}
    if not given:
        raise UserError("no agent reports its environment; name one with the same spaces in the config's [fleet]")
    common = max(given.values(), key=lambda one: sum(one.fits(other) for other in given.values()))
    fitting = {name: report for name, report in given.items() if report.fits(common)}
    unlike = {name: report for name, report in given.items() if name not in fitting}
    if len(reports) - len(unlike) < least:
        first = next(iter(fitting))
        differing = "; ".join(f"{name} has {report}" for name, report in unlike.items())
        raise UserError(f"agents of one fleet must be alike: {first} has {common}; {differing}")
    counts = Counter(name for report in fitting.values() for name in report.outcomes)
    shared = sorted(name for name, count in counts.items() if 2 * count >= len(fitting))[:MOST_OUTCOMES]
    return common.model_copy(update={"outcomes": tuple(shared)})

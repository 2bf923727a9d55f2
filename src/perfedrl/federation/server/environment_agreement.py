"""Ask agents what their environments are like, and agree on one report for the run."""

import time
from collections import Counter
from collections.abc import Mapping

from perfedrl.errors import UserError
from perfedrl.federation.environment_report import MOST_OUTCOMES, PLAN_TABLE, EnvironmentReport, parsed_report
from perfedrl.federation.frames import Frame, encode
from perfedrl.federation.server.answers import Answers, AskAgents, of_kind
from perfedrl.federation.server.presenter import Presenter
from perfedrl.federation.server.run_folder import RunSpec
from perfedrl.federation.server.upload_checks import printable

PAUSE = 1.0
"""Seconds before agents are asked again of which too few answered."""
UNLIKE = "unlike"
"""The logged event of an agent that does not take part, since its environment or its report does not fit."""

Reports = dict[str, EnvironmentReport | None]
"""Reports by agent name; None of a sampler, which fits any."""


def settled_report(presenter: Presenter, spec: RunSpec, generation: int, ask: AskAgents) -> EnvironmentReport:
    """The report that the run is built on: that of an earlier job, or the one that its agents agree on now."""
    folder = presenter.folder
    saved = folder.report()
    if saved is not None:
        return parsed_report(saved)
    reports = _enough_reports(presenter, spec, generation, ask)
    agreed = agreement(reports, spec.terms.min_agents)
    for name, report in reports.items():
        if report is not None and not report.fits(agreed):
            folder.log(UNLIKE, agent=name, reason=f"it has {report}; the others have {agreed}")
    folder.write_report(agreed.model_dump_json(), generation)
    return agreed


def _enough_reports(presenter: Presenter, spec: RunSpec, generation: int, ask: AskAgents) -> Reports:
    """Ask until enough agents have reported; raise an error once so many can no longer do, or after `patience`."""
    began, needed, logged = time.monotonic(), spec.terms.min_agents, set[str]()
    while True:
        reports, refused, failures = _ask(presenter, spec, generation, ask)
        for name in sorted(refused.keys() - logged):
            presenter.log(UNLIKE, {"agent": name, "reason": refused[name]})
        logged |= refused.keys()
        if len(reports) >= needed:
            return reports
        if len(spec.agents) - len(refused) < needed or time.monotonic() - began > spec.terms.patience:
            reasons = "".join(f"; {name}: {reason}" for name, reason in sorted({**failures, **refused}.items()))
            raise UserError(f"expected reports of environments from {needed} agents, got {len(reports)}{reasons}")
        time.sleep(PAUSE)


def _ask(
    presenter: Presenter, spec: RunSpec, generation: int, ask: AskAgents
) -> tuple[Reports, dict[str, str], dict[str, str]]:
    """Ask once; return the reports, why other answers are none, and why agents did not answer."""
    about = {"run": spec.run, "generation": generation, "round": 0}
    frame = encode(Frame("describe", {name: str(value) for name, value in about.items()}))

    def enough(answers: Answers) -> bool:
        presenter.waiting(None, answers)
        return False

    answers = ask("describe", frame, set(spec.newcomers), enough, spec.terms.deadline)
    came, refused = of_kind(answers, "described")
    reports: Reports = {}
    for name, answer in came.items():
        try:
            text = answer.fields.get(PLAN_TABLE, "")
            reports[name] = parsed_report(text) if text else None
        except UserError as error:
            refused[name] = printable(str(error))
    return reports, refused, answers.failures


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

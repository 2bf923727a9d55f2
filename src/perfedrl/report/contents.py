"""What `--json` writes: the content of the terminal's tables, with numbers in full."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from perfedrl.experiments.personalize import Personalized
from perfedrl.experiments.run_list import FinishedRun, UnfinishedRun
from perfedrl.experiments.stats import over_agents
from perfedrl.registry import Registry
from perfedrl.report.tables import first_sentence, own_parameters


def runs(finished: Iterable[FinishedRun], unfinished: Iterable[UnfinishedRun] = ()) -> list[dict[str, Any]]:
    """Finished runs, then those that were interrupted or are being trained, with the round of their checkpoint.

    The return is the mean over seeds and agents after adaptation in the last round; None before a run is finished.
    """
    rows = []
    for run in finished:
        measured = {"return_after": float(over_agents(run.history.after[:, -1]).mean())}
        about = {name: run.provenance[name] for name in ("seconds", "finished")}
        rows.append(_run(run, "finished", run.rounds) | measured | about)
    for item in unfinished:
        state = "training" if item.training else "interrupted"
        unknown = dict.fromkeys(("return_after", "seconds", "finished"))
        rows.append(_run(item, state, item.round) | unknown)
    return rows


def _run(run: FinishedRun | UnfinishedRun, state: str, round_: int) -> dict[str, Any]:
    """What is known of every run."""
    place = {"state": state, "round": round_, "rounds": run.rounds}
    return {"run": run.folder.name, "folder": str(run.folder), **place, "seeds": run.seeds}


def parts(registry: Registry) -> list[dict[str, Any]]:
    """The entries of a registry with their parameters; `default` is missing where a parameter is required."""

    def parameter(name: str, p: Any) -> dict[str, Any]:
        required = p.default is p.empty
        return {"name": name} if required else {"name": name, "default": plain(p.default)}

    return [
        {
            "name": name,
            "parameters": [parameter(key, p) for key, p in own_parameters(registry, name).items()],
            "what": first_sentence(factory),
        }
        for name, factory in registry.items()
    ]


def titles(named: Mapping[str, Any]) -> list[dict[str, str]]:
    """Names and titles of named items."""
    return [{"name": name, "what": item.title} for name, item in named.items()]


def personalized(own: Personalized, file: Path) -> dict[str, Any]:
    """An agent's outcomes before and after personalization, with the settings and the file of its policy."""
    return {
        "run": str(own.run.folder),
        "agent": own.agent,
        "choice": {name: plain(x) for name, x in own.choice.items()},
        "warnings": list(own.warnings),
        "before": {name: x._asdict() for name, x in own.before.items()},
        "after": {name: x._asdict() for name, x in own.after.items()},
        "change": own.change._asdict(),
        "worse": own.worse,
        "kept": own.kept,
        "trajectories": own.trajectories,
        "steps": own.steps,
        "cost": own.cost,
        "alpha": own.alpha,
        "seed": own.seed,
        "draw": own.draw,
        "file": str(file),
    }


def plain(value: Any) -> Any:
    """A default as JSON can hold it."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value if isinstance(value, str | int | float | None) else str(value)

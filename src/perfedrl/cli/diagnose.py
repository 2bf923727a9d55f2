"""The command `diagnose`: does a fleet need personalization, how much, and by which mechanism?"""

from pathlib import Path
from typing import Annotated

import typer

from perfedrl import compilation
from perfedrl.cli.console import JsonFile, Restart, Trust, as_json, command_line, out, print_written, training
from perfedrl.experiments.config import load_config
from perfedrl.experiments.files import check_file, check_folder, write_atomically
from perfedrl.report import page
from perfedrl.studies.diagnosis import diagnose_config
from perfedrl.studies.diagnosis.diagnosis import AGENTS, SEEDS, TRAJECTORIES
from perfedrl.studies.diagnosis.recommendation import advice, answer, as_toml
from perfedrl.studies.diagnosis.tables import content, diagnosis_page, terminal


def diagnose(
    config: Annotated[Path, typer.Argument(help="An experiment's config; its fleet and its policy are diagnosed.")],
    trajectories: Annotated[
        int, typer.Option(help="Trajectories of each agent for every policy that is trained.")
    ] = TRAJECTORIES,
    seeds: Annotated[int, typer.Option(help="Number of seeds.")] = SEEDS,
    agents: Annotated[int, typer.Option(help="The most agents to look at, evenly chosen.")] = AGENTS,
    results: Annotated[Path, typer.Option(help="Folder for finished parts, from which the command goes on.")] = Path(
        "diagnoses"
    ),
    restart: Restart = False,
    report: Annotated[Path, typer.Option(help="The page that is written, one .html file.")] = Path("diagnosis.html"),
    trust: Trust = False,
    json_file: JsonFile = None,
) -> None:
    """Find out whether a fleet needs personalization before training it for long.

    Trains a small policy of its own for each agent and one policy for all, and measures every policy on every agent. It
    says what perfect personalization would gain, what one gradient step from 20, 50 and 200 trajectories gains, from
    how many trajectories an agent is better off alone, whether agents fall into groups, and which mechanism to use.
    Tabular and linear-quadratic agents are solved exactly. Minutes; an interrupted diagnosis goes on where it stopped.

    Example: perfedrl diagnose configs/gridworld.toml
    """
    for path in (report, json_file):
        if path:
            check_file(path)
    check_folder(results)
    compilation.use_all_cores()
    compilation.enable_cache()
    checked = load_config(config, trust=trust)
    numbers = {"seeds": seeds, "trajectories": trajectories, "agents": agents}
    with training(restart) as observers:
        found = diagnose_config(checked, results, **numbers, restart=restart, observers=observers)
    for table in terminal(found):
        out.print(table)
    out.print(f"Does this fleet need personalization? {answer(found)}.", highlight=False, soft_wrap=True)
    out.print(f"Recommended: {advice(found)}. In a config:", highlight=False, soft_wrap=True)
    out.print(as_toml(found), highlight=False, markup=False)
    written = [page.write(diagnosis_page(found, command_line()), report)]
    if json_file:
        write_atomically(json_file, as_json(content(found)))
        written.append(json_file)
    print_written(written)

"""Commands of a fleet on many machines: init, server, join, train, status, stop, revoke, demo."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from perfedrl.cli.console import INTERRUPTED, err, out, say
from perfedrl.errors import UserError

app = typer.Typer(
    help="Train over a network: every agent on its own machine, with its own environment; only parameters cross, by "
    "mutual TLS. Start with `perfedrl federation demo`.",
    no_args_is_help=True,
)
FleetArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The fleet's folder, made by `init`.")]


def engine() -> None:
    """Refuse to go on without the engine."""
    try:
        import nvflare  # noqa: F401
    except ImportError as error:
        raise UserError('this needs NVFlare, which is not installed: pip install "perfedrl[federation]"') from error


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the fleet, on the server's machine.")],
    agents: Annotated[int, typer.Option(help="How many agents may take part.")],
    host: Annotated[str, typer.Option(help="The server's host name, as the agents' machines know it.")] = "localhost",
    port: Annotated[int, typer.Option(help="The one port that the server listens on.")] = 8002,
) -> None:
    """Make a fleet: certificates, the server's kit, and one start-up kit for each agent.

    Carry each folder DIR/kits/agent-N to its agent's machine by a safe way: it holds that agent's private key.

    Example: perfedrl federation init fleet --agents 3 --host fleet.example.org
    """
    engine()
    from perfedrl.federation.engine import provision

    about = provision.init(folder, agents, host, port)
    out.print(
        f"made {about.fleet} in {folder} for {host}:{port}\n"
        f"kits of {len(about.agents)} agents are in {folder / 'kits'}; all certificates are valid until "
        f"{about.valid_until[:10]}\n"
        f"next: perfedrl federation server {folder}",
        highlight=False,
        soft_wrap=True,
    )


@app.command()
def server(folder: FleetArgument) -> None:
    """Run the fleet's server until Ctrl-C or `stop`; it is started again when it crashes."""
    engine()
    from perfedrl.federation.engine import service
    from perfedrl.federation.engine.fleet_folder import FleetFolder

    service.serve(FleetFolder(folder), say)


@app.command()
def join(
    kit: Annotated[Path, typer.Argument(help="This agent's start-up kit.")],
    agent_config: Annotated[
        Path | None, typer.Option(help="A TOML file: the agent's environment, and what it is willing to do.")
    ] = None,
    env: Annotated[
        str | None, typer.Option(help="Or an environment alone: a name, or module:function for one's own.")
    ] = None,
) -> None:
    """Take part as one agent, until Ctrl-C or `stop`: runs the agent's daemon and its bridge to the server.

    Trajectories and the agent's personal state stay on this machine. `perfedrl agent --help` says what the file holds.

    Examples: perfedrl federation join agent-0 --agent-config agent.toml;
    perfedrl federation join agent-0 --env my_package.robot:make
    """
    engine()
    from perfedrl.federation.engine import service
    from perfedrl.federation.engine.fleet_folder import Kit

    own = Kit(kit)
    if agent_config is None and env is None:
        raise UserError("say what this agent's environment is: --agent-config FILE, or --env NAME")
    if agent_config is not None and not agent_config.is_file():
        raise UserError(f"there is no agent's config {agent_config}")
    service.join(own, agent_config, env, say)


@app.command()
def train(
    folder: FleetArgument,
    config: Annotated[Path, typer.Argument(help="An experiment's config, as for `perfedrl train`.")],
    seed: Annotated[int | None, typer.Option(help="Which of the config's seeds; its first.")] = None,
    min_agents: Annotated[
        int | None, typer.Option(help="Answers without which no round counts; all when left out.")
    ] = None,
    deadline: Annotated[
        float, typer.Option(help="Seconds after which a round closes with those who answered.")
    ] = 600.0,
    wait: Annotated[float, typer.Option(help="Seconds to wait for all agents before --min-agents are enough.")] = 60.0,
    patience: Annotated[
        float, typer.Option(help="Seconds for which a round with too few answers is repeated.")
    ] = 600.0,
    factor: Annotated[float, typer.Option(help="An upload this many times farther away than usual is refused.")] = 10.0,
    strikes: Annotated[int, typer.Option(help="Refused uploads in a row after which an agent is shut out.")] = 3,
    personalize: Annotated[
        int, typer.Option(help="Trajectories each agent personalizes with at the end; 0: none.")
    ] = 200,
    release: Annotated[
        list[str] | None, typer.Option(help="An agent to let out of quarantine; may be given twice.")
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Begin again what is half done or finished.")] = False,
) -> None:
    """Train a config over the network, on the server's machine, through crashes of any part of it.

    A run that was stopped goes on at its next round; the finished one is in DIR/runs, like any other run.

    Example: perfedrl federation train fleet configs/arc.toml --min-agents 4 --deadline 60
    """
    engine()
    from perfedrl.federation.server.run_folder import Terms

    agreed: dict[str, Any] = {"patience": patience, "factor": factor, "strikes": strikes, "personalize": personalize}
    terms = lambda agents: Terms(agents if min_agents is None else min_agents, deadline, **agreed)  # noqa: E731
    trained(folder, config, seed, terms, wait, restart, release or [])


def trained(
    folder: Path, file: Path, seed: int | None, terms: Any, wait: float, restart: bool, release: list[str]
) -> None:
    """Train, unless it is done already, and show the run; `terms` is a function of the number of agents."""
    from perfedrl.experiments.config import load_config
    from perfedrl.experiments.store import load_run
    from perfedrl.federation.engine.fleet_folder import FleetFolder
    from perfedrl.federation.engine.supervisor import Supervisor, finished, prepare
    from perfedrl.report import tables

    fleet, config = FleetFolder(folder), load_config(file)
    done = None if restart else finished(fleet, config, seed)
    if done is None:
        control = prepare(fleet, config, terms(config.parts.fleet.agents), seed, restart, release)
        with watching(restart) as watch:
            Supervisor(fleet, control, wait, watch).run()
        done = finished(fleet, config, seed)
    assert done is not None
    run = load_run(done)
    out.print(tables.summary(run))
    out.print(f"{tables.cost(run)}\nsaved in {run.folder}", highlight=False, soft_wrap=True)


@contextmanager
def watching(restart: bool = False) -> Iterator[Callable[[Any], None]]:
    """A live line about a run, and a lasting one for whatever is out of the ordinary."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("rounds")
    try:
        with Progress(*columns, TextColumn("{task.fields[about]}"), TimeElapsedColumn(), console=err) as bars:
            task = bars.add_task("starting", total=None, about="")

            def watch(view: Any) -> None:
                for event in view.news:
                    if line := told(event):
                        say(line)
                now = view.progress
                bars.update(task, description=view.doing, completed=now.get("round", 0), total=now.get("rounds"))
                bars.update(task, about=standing(view))

            yield watch
    except KeyboardInterrupt:
        same = "the same command without --restart" if restart else "the same command"
        say(f"stopped; run {same} to go on from the last round", "yellow")
        raise typer.Exit(INTERRUPTED) from None


def standing(view: Any) -> str:
    """Who is in, what it is worth, how fast it goes."""
    now = view.progress
    if view.doing not in ("training", "finished"):
        return f"{len(view.connected)} of {len(view.expected)} agents connected"
    states = list(now.get("agents", {}).values())
    parts = [f"{states.count(kind)} {kind}" for kind in dict.fromkeys(("in", "waiting", *states)) if kind in states]
    if now.get("objective") is not None:
        parts.append(f"objective {now['objective']:.3f}")
    if now.get("seconds_per_round") is not None:
        parts.append(f"{now['seconds_per_round']:.2f} s/round")
    if now.get("epsilon") is not None:
        parts.append(f"epsilon {now['epsilon']:.3g}")
    return ", ".join(parts)


def told(event: dict[str, Any]) -> str | None:
    """An event as a sentence; rounds that went well are no event."""
    agent, reason, round_ = (event.get(key) for key in ("agent", "reason", "round"))
    sentences = {
        "failure": f"round {round_}: {agent} failed: {reason}",
        "silent": f"round {round_}: {agent} did not answer in time",
        "back": f"round {round_}: {agent} is back",
        "refused": f"round {round_}: an upload of {agent} was refused: {reason}",
        "quarantined": f"round {round_}: {agent} is in quarantine",
        "repeated": f"round {round_}: too few answers, asked again",
        "membership": f"taken in: {', '.join(event.get('agents', []))}",
        "killed": f"round {round_}: {agent} was killed, to see what happens",
        "server lost": "the server is gone; training goes on when it is back",
        "job lost": "the engine's job ended; it is submitted again",
        "personalized": f"{agent}: return {event.get('before.return', 0):.3f} before its own step, "
        f"{event.get('after.return', 0):.3f} after",
    }
    return sentences.get(event["event"])


@app.command()
def status(folder: FleetArgument) -> None:
    """Say what a fleet does: the server, the agents, the runs under way."""
    engine()
    from perfedrl.federation.engine import service
    from perfedrl.federation.engine.admin_session import Operator, Unreachable
    from perfedrl.federation.engine.fleet_folder import FleetFolder
    from perfedrl.federation.engine.supervisor import View
    from perfedrl.federation.server.run_folder import Control

    fleet = FleetFolder(folder)
    lines = [f"{fleet.about.fleet}: {fleet.about.host}:{fleet.about.port}, valid until {fleet.about.valid_until[:10]}"]
    pid = service.holder(fleet.server)
    lines.append(f"server: {'not running' if pid is None else f'running (process {pid})'}")
    try:
        operator = Operator(fleet, timeout=3.0)
        try:
            connected = operator.connected()
        finally:
            operator.close()
        lines += [f"{name}: {'connected' if name in connected else 'away'}" for name in fleet.about.agents]
    except Unreachable:
        lines.append("agents: unknown, the server does not answer")
    for path in sorted((fleet.folder / "control").glob("*/")):
        progress = Control(path).progress()
        about = standing(View("training", progress))
        done = f"round {progress.get('round', 0)} of {progress.get('rounds', '?')}"
        lines.append(f"{path.name}: {progress.get('phase', 'not started')}, {done}, {about}".rstrip(", "))
    out.print("\n".join(lines), highlight=False, soft_wrap=True)


@app.command()
def stop(
    folder: Annotated[Path, typer.Argument(help="A fleet's folder, or an agent's kit, on the machine where it runs.")],
) -> None:
    """Stop the server of a fleet, or an agent, on this machine; a run under way waits for them."""
    engine()
    from perfedrl.federation.engine import service
    from perfedrl.federation.engine.fleet_folder import ABOUT, FleetFolder, Kit

    where = FleetFolder(folder).server if (folder / ABOUT).exists() else Kit(folder).folder
    out.print("stopped" if service.stop(where) else "nothing runs there", highlight=False)


@app.command()
def revoke(
    folder: FleetArgument,
    agent: Annotated[str, typer.Argument(help="Whose kit: agent-2, say.")],
    undo: Annotated[bool, typer.Option("--undo", help="Let the agent in again.")] = False,
) -> None:
    """Shut an agent out for good: from now on its kit opens nothing. The server must be running."""
    engine()
    from perfedrl.errors import nearest
    from perfedrl.federation.engine.admin_session import Operator
    from perfedrl.federation.engine.fleet_folder import FleetFolder

    fleet = FleetFolder(folder)
    if agent not in fleet.about.agents:
        raise UserError(f"the fleet has no agent {agent!r}{nearest(agent, fleet.about.agents)}")
    operator = Operator(fleet, timeout=5.0)
    try:
        (operator.let_in if undo else operator.shut_out)(agent)
    finally:
        operator.close()
    out.print(f"{agent} is {'let in again' if undo else 'shut out'}", highlight=False)


@app.command()
def demo(
    folder: Annotated[
        Path | None,
        typer.Option(help="Keep the fleet and its logs in this new folder; by default they are thrown away."),
    ] = None,
) -> None:
    """See it work on this machine, in about a minute: a server and three agents, TLS between them, one agent killed.

    Makes certificates, starts the server and the agents as processes of their own, trains, kills an agent's daemon on
    the way, and lets every agent personalize.
    """
    engine()
    import tempfile

    from perfedrl.experiments.store import load_run
    from perfedrl.federation.engine import demo as demonstration
    from perfedrl.report import tables

    if folder is not None and folder.exists():
        raise UserError(f"{folder} is there already: the demonstration needs a new folder")
    with tempfile.TemporaryDirectory(prefix="perfedrl-") as scratch, watching() as watch:
        done, control = demonstration.run(folder or Path(scratch) / "demo", watch)
        run, events = load_run(done), control.events()
    out.print(tables.summary(run))
    out.print("\n".join([*demonstration.story(events), tables.cost(run)]), highlight=False, soft_wrap=True)
    if folder is not None:
        out.print(f"saved in {done}", highlight=False, soft_wrap=True)

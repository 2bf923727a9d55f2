"""The commands `perfedrl federation ...`: init, server, join, train, status, stop, revoke, demo."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from perfedrl.cli import certificates
from perfedrl.cli.console import err, exit_stopped, handled, out, print_message, same_command
from perfedrl.cli.fleet_argument import FleetArgument, require_nvflare
from perfedrl.cli.stop_signal import STOP
from perfedrl.errors import UserError
from perfedrl.pace import SECONDS_BETWEEN_LINES

app = typer.Typer(
    help="Train over a network: every agent on its own machine with its own environment; only parameters are sent, "
    "over mutual TLS. Start with `perfedrl federation demo`.",
    no_args_is_help=True,
)
WORDS = {"in": "answered", "waiting": "at work"}
"""States of agents in other words than in the status file."""


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the fleet, on the server's machine.")],
    agents: Annotated[int, typer.Option(help="The number of agents.")],
    host: Annotated[str, typer.Option(help="The server's host name, as the agents' machines know it.")] = "localhost",
    port: Annotated[int, typer.Option(help="The port that the server listens on.")] = 8002,
    keys_on_agents: Annotated[
        bool,
        typer.Option(
            "--keys-on-agents", help="Let each agent's machine make its private key: see `federation request`."
        ),
    ] = False,
) -> None:
    """Create a fleet: certificates, the server's kit, and one start-up kit for each agent.

    Copy each folder DIR/kits/agent-N to its agent's machine over a secure channel: it contains that agent's private
    key, unless you say `--keys-on-agents`.

    Example: perfedrl federation init fleet --agents 3 --host fleet.example.org
    """
    require_nvflare()
    from perfedrl.federation.engine import provision
    from perfedrl.federation.engine.authority import valid_until

    info = provision.init(folder, agents, host, port, keys_on_agents)
    until = valid_until(folder / "server" / "startup" / "server.crt")
    keys = ", without keys: on each agent's machine use `perfedrl federation request`" if keys_on_agents else ""
    out.print(
        f"created {info.fleet} in {folder} for {host}:{port}\n"
        f"the kits of {len(info.agents)} agents are in {folder / 'kits'}{keys}; all certificates are valid until "
        f"{until:%Y-%m-%d}\n"
        f"next: perfedrl federation server {folder}",
        highlight=False,
        soft_wrap=True,
    )


@app.command()
def server(folder: FleetArgument) -> None:
    """Run the fleet's server until Ctrl-C or `stop`; it is restarted when it crashes."""
    require_nvflare()
    from perfedrl.federation.engine import service
    from perfedrl.federation.engine.fleet_folder import FleetFolder

    service.serve(FleetFolder(folder), print_message)


@app.command()
def join(
    kit: Annotated[Path, typer.Argument(help="This agent's start-up kit.")],
    agent_config: Annotated[
        Path | None, typer.Option(help="A TOML file with the agent's environment, limits, privacy and trust.")
    ] = None,
    env: Annotated[
        str | None, typer.Option(help="Or only an environment: a name, or module:function for your own.")
    ] = None,
) -> None:
    """Join as one agent until Ctrl-C or `stop`: runs the agent's daemon and its bridge to the server.

    Trajectories and the agent's personal state stay on this machine. `perfedrl agent --help` describes the file.

    Examples: perfedrl federation join agent-0 --agent-config agent.toml;
    perfedrl federation join agent-0 --env my_package.robot:make
    """
    require_nvflare()
    from perfedrl.federation.engine import service
    from perfedrl.federation.engine.fleet_folder import Kit

    own = Kit(kit)
    if agent_config is None and env is None:
        raise UserError("this agent needs an environment: --agent-config FILE, or --env NAME")
    if agent_config is not None and not agent_config.is_file():
        raise UserError(f"there is no agent config {agent_config}")
    service.join(own, agent_config, env, print_message)


@app.command()
def train(
    folder: FleetArgument,
    config: Annotated[Path, typer.Argument(help="An experiment's config, as for `perfedrl train`.")],
    seed: Annotated[int | None, typer.Option(help="One of the config's seeds; the first by default.")] = None,
    min_agents: Annotated[
        int | None, typer.Option(help="The least number of answers in a round; more than half of all by default.")
    ] = None,
    deadline: Annotated[
        float, typer.Option(help="Seconds after which a round closes with the agents that answered.")
    ] = 600.0,
    wait: Annotated[float, typer.Option(help="Seconds to wait for all agents before --min-agents suffice.")] = 60.0,
    patience: Annotated[
        float, typer.Option(help="Seconds for which a round with too few answers is repeated.")
    ] = 600.0,
    factor: Annotated[
        float, typer.Option(help="Uploads more than this many times as far away as usual are shortened to that limit.")
    ] = 10.0,
    strikes: Annotated[int, typer.Option(help="Rejected uploads in a row after which an agent is in quarantine.")] = 3,
    personalize: Annotated[
        int, typer.Option(help="Trajectories with which each agent personalizes at the end; 0 to skip.")
    ] = 200,
    staleness: Annotated[
        int, typer.Option(help="Rounds after which an upload of asynchronous agents no longer counts.")
    ] = 1000,
    release: Annotated[
        list[str] | None, typer.Option(help="An agent to release from quarantine or exclusion; may be repeated.")
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Start again an unfinished or finished run.")] = False,
) -> None:
    """Train a config over the network; run this on the server's machine. Survives crashes of any part of the fleet.

    A stopped run continues with its next round; the finished run is in DIR/runs, like any other run. Environments that
    are played in Python need not be installed here, since agents report their spaces. The first kits train, as many as
    the config has agents; the others are new agents, which personalize at the end.

    Example: perfedrl federation train fleet configs/arc.toml --min-agents 4 --deadline 60
    """
    require_nvflare()
    from perfedrl.federation.server.run_folder import Terms

    def terms(agents: int) -> Terms:
        least = agents // 2 + 1 if min_agents is None else min_agents
        return Terms(least, deadline, patience, factor, strikes, personalize, staleness)

    train_and_show(folder, config, seed, terms, wait, restart, release or [])


def train_and_show(
    folder: Path,
    file: Path,
    seed: int | None,
    terms: Callable[[int], Any],
    wait: float,
    restart: bool,
    release: list[str],
) -> None:
    """Train unless the run is finished, and show it; `terms` is a function of the number of agents.

    The networked config is derived once, and its experiment is built once.
    """
    from perfedrl.experiments.config import read_config
    from perfedrl.experiments.store import load_run
    from perfedrl.federation.engine.fleet_folder import FleetFolder
    from perfedrl.federation.engine.supervisor import Supervisor, config_to_train, finished, only_training, prepare
    from perfedrl.federation.environment_report import agents_of
    from perfedrl.federation.server.network_config import aggregation_sentence, trained_config
    from perfedrl.report import tables

    fleet = FleetFolder(folder)
    try:
        given = read_config(file)
        config = config_to_train(fleet, given, seed, restart)
    except UserError as error:
        raise UserError(str(error) if str(file) in str(error) else f"{file}: {error}") from error
    done = None if restart else finished(fleet, config)
    trained = done is None
    if trained:
        places = dict.fromkeys((Path.cwd(), file.parent.resolve()))
        with handled(), only_training(fleet):
            run_folder = prepare(fleet, config, terms(agents_of(config)), None, restart, release, tuple(places))
            spec = run_folder.spec()
            print_message(aggregation_sentence(given, config))
            if spec.terms.min_agents < len(spec.agents):
                print_message(
                    f"a round needs answers of {spec.terms.min_agents} of {len(spec.agents)} agents; set --min-agents "
                    f"{len(spec.agents)} to stop rather than go on without one"
                )
            with live_line(f"run {same_command(restart)} to continue from the last round") as watch:
                Supervisor(fleet, run_folder, wait, watch).run()
        done = finished(fleet, config)
    assert done is not None
    run = replace(load_run(done, trained_config(done, config)), from_disk=not trained)
    out.print(tables.summary(run))
    out.print(tables.cost_and_folder(run), highlight=False, soft_wrap=True)


@contextmanager
def live_line(advice: str) -> Iterator[Callable[[Any], None]]:
    """Show a run's progress, as a live line or plain lines, and a lasting line for every unusual event.

    Ctrl-C and SIGTERM stop the run, at the latest when it is shown again: NVFlare drops exceptions of signals. `advice`
    then says what to do next.
    """
    try:
        if not err.is_terminal:
            yield FleetLines()
            return
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("rounds")
        with Progress(*columns, TextColumn("{task.fields[about]}"), TimeElapsedColumn(), console=err) as bars:
            task = bars.add_task("starting", total=None, about="")

            def watch(view: Any) -> None:
                STOP.check()
                print_news(view)
                now = view.progress
                bars.update(task, description=view.doing, completed=now.get("round", 0), total=now.get("rounds"))
                bars.update(task, about=summary(view))

            yield watch
    except KeyboardInterrupt:
        exit_stopped(f"stopped; {advice}")


class FleetLines:
    """Prints plain lines where there is no terminal: when a fleet begins something else, and while it trains."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._when, self._said = clock, clock(), ("", 0)

    def __call__(self, view: Any) -> None:
        STOP.check()
        print_news(view)
        doing, round_ = now = view.doing, view.progress.get("round", 0)
        due = now != self._said and self._clock() - self._when >= SECONDS_BETWEEN_LINES
        if doing != self._said[0] or due:
            self._said, self._when = now, self._clock()
            rounds = view.progress.get("rounds")
            place = f", round {round_} of {rounds}" if rounds else ""
            about = summary(view)
            print_message(f"{doing}{place}{about and ', '}{about}")


def print_news(view: Any) -> None:
    """Print a line for every unusual event."""
    for event in view.news:
        if line := sentence(event):
            print_message(line)


def summary(view: Any) -> str:
    """The agents' states, their return, the seconds per round and the privacy loss, in one line."""
    now = view.progress
    if view.doing not in ("training", "finished"):
        return f"{len(view.connected)} of {len(view.expected)} agents connected"
    states = list(now.get("agents", {}).values())
    counts = {kind: states.count(kind) for kind in dict.fromkeys(("in", "waiting", *states)) if kind in states}
    parts = [f"{count} {WORDS.get(kind, kind)}" for kind, count in counts.items()]
    if now.get("objective") is not None:
        parts.append(f"return after adaptation {now['objective']:.3f} (median {now['median']:.3f})")
    if now.get("seconds_per_round") is not None:
        parts.append(f"{now['seconds_per_round']:.2f} s/round")
    if now.get("epsilon") is not None:
        parts.append(f"epsilon {now['epsilon']:.3g}")
    return ", ".join(parts)


def sentence(event: dict[str, Any]) -> str | None:
    """An unusual event as a sentence; None for normal ones."""
    agent, reason, round_ = (event.get(key) for key in ("agent", "reason", "round"))
    before, after = event.get("before.return", 0), event.get("after.return", 0)
    sentences = {
        "failure": f"round {round_}: {agent} failed: {reason}",
        "silent": f"round {round_}: {agent} did not answer in time",
        "back": f"round {round_}: {agent} is back",
        "refused": f"round {round_}: an upload of {agent} was rejected: {reason}",
        "clipped": f"round {round_}: an upload of {agent} was {event.get('factor', 1):.3g} times too long and was "
        "shortened to the limit",
        "opposing": f"round {round_}: for {event.get('rounds')} rounds the uploads of {agent} have pointed against all "
        "others'; it may be hostile, or its task the opposite of theirs",
        "unlike": f"{agent} does not take part: {reason}",
        "quarantined": f"round {round_}: {agent} is in quarantine",
        "gone": f"{agent} left the job: {reason}",
        "excess": f"{agent} sends more than its share and is slowed down; see server.log",
        "excluded": f"{agent} is excluded, since its process ended again and again; --release {agent} lets it in again",
        "repeated": f"round {round_}: too few answers, asking again",
        "membership": f"starting a new job to take in: {', '.join(event.get('agents', []))}",
        "killed": f"round {round_}: {agent} was killed on purpose",
        "server lost": "the server does not answer; training continues when it is back",
        "false outcomes": f"round {round_}: outcomes of {agent} do not count: {reason}",
        "outlier": f"round {round_}: the return of {agent} is far from those of all others; see the median",
        "damaged checkpoint": f"the last checkpoint is damaged; training continues after round {round_}",
        "job lost": "the NVFlare job ended; submitting it again",
        "personalized": f"{agent}: return {before:.3f} before adaptation, "
        f"{'only ' if after < before else ''}{after:.3f} after",
    }
    return sentences.get(event["event"])


@app.command()
def status(folder: FleetArgument) -> None:
    """Show the state of a fleet: the server, the agents, and the runs under way."""
    require_nvflare()
    from perfedrl.federation.engine import service
    from perfedrl.federation.engine.admin_session import Operator, ServerUnreachable
    from perfedrl.federation.engine.authority import is_soon
    from perfedrl.federation.engine.connection_log import ConnectionLog
    from perfedrl.federation.engine.fleet_folder import FleetFolder
    from perfedrl.federation.engine.renewal import ends
    from perfedrl.federation.engine.supervisor import View
    from perfedrl.federation.server.run_folder import RunFolder

    fleet = FleetFolder(folder)
    until = ends(fleet)
    lines = [f"{fleet.info.fleet}: {fleet.info.host}:{fleet.info.port}, valid until {min(until.values()):%Y-%m-%d}"]
    if ending := ", ".join(name for name, end in until.items() if is_soon(end)):
        lines.append(f"warning: certificates end within 30 days ({ending}): perfedrl federation renew {folder}")
    pid = service.holder(fleet.server)
    lines.append(f"server: {'not running' if pid is None else f'running (process {pid})'}")
    try:
        operator = Operator(fleet, timeout=3.0)
        try:
            connected = operator.connected()
        finally:
            operator.close()
        lines += [f"{name}: {'connected' if name in connected else 'away'}" for name in fleet.info.agents]
        told = ConnectionLog(fleet.connection_log)
        lines += [line for name in fleet.info.agents if (line := told.last(name))]
    except ServerUnreachable:
        lines.append("agents: unknown, the server does not answer")
    for path in sorted((fleet.folder / "control").glob("*/")):
        progress = RunFolder(path).progress()
        about = summary(View("training", progress))
        done = f"round {progress.get('round', 0)} of {progress.get('rounds', '?')}"
        lines.append(f"{path.name}: {progress.get('phase', 'not started')}, {done}, {about}".rstrip(", "))
    out.print("\n".join(lines), highlight=False, soft_wrap=True)


@app.command()
def stop(
    folder: Annotated[Path, typer.Argument(help="A fleet's folder or an agent's kit, on the machine where it runs.")],
) -> None:
    """Stop a fleet's server or an agent on this machine; a run under way waits until it is back."""
    require_nvflare()
    from perfedrl.federation.engine import service
    from perfedrl.federation.engine.fleet_folder import ABOUT, FleetFolder, Kit

    where = FleetFolder(folder).server if (folder / ABOUT).exists() else Kit(folder).folder
    out.print("stopped" if service.stop(where) else "nothing is running there", highlight=False)


@app.command()
def revoke(
    folder: FleetArgument,
    agent: Annotated[str, typer.Argument(help="The agent's name, e.g. agent-2.")],
    undo: Annotated[bool, typer.Option("--undo", help="Admit the agent again.")] = False,
) -> None:
    """Revoke an agent's kit, so that it cannot connect any more. The server must be running."""
    require_nvflare()
    from perfedrl.federation.engine.admin_session import Operator
    from perfedrl.federation.engine.fleet_folder import FleetFolder
    from perfedrl.federation.engine.renewal import check_agent

    fleet = FleetFolder(folder)
    check_agent(fleet, agent)
    operator = Operator(fleet, timeout=5.0)
    try:
        (operator.reinstate if undo else operator.revoke)(agent)
    finally:
        operator.close()
    out.print(f"{agent} is {'admitted again' if undo else 'revoked'}", highlight=False)


app.command()(certificates.renew)
app.command()(certificates.request)
app.command()(certificates.sign)


@app.command()
def demo(
    folder: Annotated[
        Path | None,
        typer.Option(help="Keep the fleet and its logs in this new folder; by default they are deleted."),
    ] = None,
) -> None:
    """Run a fleet on this machine for about a minute: a server and three agents over TLS, one of which is killed.

    Creates certificates, starts the server and the agents as separate processes, trains, kills an agent's daemon on
    the way, and lets every agent personalize.
    """
    require_nvflare()
    import tempfile

    from perfedrl.experiments.store import load_run
    from perfedrl.federation.engine import demo as demonstration
    from perfedrl.report import tables

    if folder is not None and folder.exists():
        raise UserError(f"{folder} exists already: the demonstration needs a new folder")
    with (
        handled(),
        live_line("the demonstration begins anew") as watch,
        tempfile.TemporaryDirectory(prefix="perfedrl-") as scratch,
    ):
        done, run_folder = demonstration.run(folder or Path(scratch) / "demo", watch)
        run, events = load_run(done), run_folder.events()
    out.print(tables.summary(run))
    out.print("\n".join([*demonstration.story(events), tables.cost(run)]), highlight=False, soft_wrap=True)
    if folder is not None:
        out.print(f"saved in {done}", highlight=False, soft_wrap=True)

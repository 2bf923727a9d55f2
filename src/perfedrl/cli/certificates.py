"""The command `perfedrl federation renew`: certificates of a fleet."""

from typing import Annotated

import typer

from perfedrl.cli.console import out
from perfedrl.cli.fleet_argument import FleetArgument, require_nvflare


def renew(
    folder: FleetArgument,
    agent: Annotated[str | None, typer.Option(help="Only this agent, e.g. agent-1.")] = None,
) -> None:
    """Make new certificates for the server, the operator and all agents, before the old ones end.

    Names and keys stay, and so does everything else in the kits. Restart the server; copy the new file
    DIR/kits/agent-N/startup/client.crt, which is no secret, over the old one in the kit on each agent's machine, and
    let the agent join again. Agents may follow one by one, since old certificates are valid until they end. Revoked
    agents get no new certificate.

    Examples: perfedrl federation renew fleet; perfedrl federation renew fleet --agent agent-1
    """
    require_nvflare()
    from perfedrl.federation.engine import renewal
    from perfedrl.federation.engine.fleet_folder import FleetFolder

    fleet = FleetFolder(folder)
    renewed, left_out = renewal.renew(fleet, agent)
    until = min(end for name, end in renewal.ends(fleet).items() if name in renewed)
    lines = [f"new certificates, valid until {until:%Y-%m-%d}: {', '.join(renewed)}"]
    lines += [f"{name} gets no new certificate: {why}" for name, why in left_out.items()]
    if renewal.SERVER in renewed:
        lines.append(f"restart the server: perfedrl federation server {folder}")
    lines += [
        f"copy {folder / 'kits' / name / 'startup' / 'client.crt'} into the folder startup of the kit of {name}"
        for name in renewed
        if name in fleet.info.agents
    ]
    out.print("\n".join(lines), highlight=False, soft_wrap=True)

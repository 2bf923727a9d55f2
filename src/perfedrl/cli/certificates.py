"""The commands on certificates of a fleet: `perfedrl federation renew`, `request` and `sign`."""

from pathlib import Path
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


def request(
    kit: Annotated[Path, typer.Argument(help="This agent's start-up kit, from `init --keys-on-agents`.")],
) -> None:
    """Make this agent's private key on this machine, and a request for its certificate.

    The key, KIT/startup/client.key, never leaves the machine. Send the request, KIT/agent-N.csr, to the operator; it
    is no secret. `perfedrl federation sign` makes the certificate from it: put it beside the key. A key that is there
    already is used again; to make another one, delete it first.

    Example: perfedrl federation request agent-0
    """
    require_nvflare()
    from perfedrl.federation.engine import signing_requests
    from perfedrl.federation.engine.fleet_folder import Kit

    file, fingerprint = signing_requests.request(Kit(kit))
    name = file.stem
    out.print(
        f"the request of {name} is {kit / file.name}; the fingerprint of its key is {fingerprint}\n"
        f"next, on the server's machine: perfedrl federation sign DIR {name} {file.name}",
        highlight=False,
        soft_wrap=True,
    )


def sign(
    folder: FleetArgument,
    agent: Annotated[str, typer.Argument(help="The agent's name, e.g. agent-2.")],
    file: Annotated[Path, typer.Argument(metavar="REQUEST", help="The file that `request` made on its machine.")],
    again: Annotated[bool, typer.Option("--again", help="Replace the agent's certificate.")] = False,
) -> None:
    """Sign the certificate that an agent's machine requests; run this on the server's machine.

    The request must name this agent, and be signed with the private key that belongs to it; nothing but the public key
    is taken from it. Compare the fingerprint with the one that `request` printed, over a channel that you trust: it
    tells whether the request comes from that machine. Then copy DIR/kits/agent-N/startup/client.crt into the folder
    startup of the kit on the agent's machine.

    Example: perfedrl federation sign fleet agent-0 agent-0.csr
    """
    require_nvflare()
    from perfedrl.federation.engine import signing_requests
    from perfedrl.federation.engine.authority import valid_until
    from perfedrl.federation.engine.fleet_folder import FleetFolder

    made, fingerprint = signing_requests.sign(FleetFolder(folder), agent, file, again)
    out.print(
        f"signed the certificate of {agent}, valid until {valid_until(made):%Y-%m-%d}; the fingerprint of its key is "
        f"{fingerprint}\n"
        f"next: copy {folder / 'kits' / agent / 'startup' / made.name} into the folder startup of the kit of {agent}",
        highlight=False,
        soft_wrap=True,
    )

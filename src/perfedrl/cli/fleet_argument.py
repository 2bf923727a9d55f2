"""The argument of commands on a fleet's folder, and the check that the engine is installed."""

from pathlib import Path
from typing import Annotated

import typer

from perfedrl.errors import UserError

FleetArgument = Annotated[Path, typer.Argument(metavar="DIR", help="The fleet's folder, created by `init`.")]


def require_nvflare() -> None:
    """Raise an error if NVFlare is not installed."""
    try:
        import nvflare  # noqa: F401
    except ImportError as error:
        raise UserError(
            'this command needs NVFlare, which is not installed: pip install "perfedrl[federation]"'
        ) from error

"""The option `--set NAME=VALUE`, which gives an agent's parameters on the command line."""

from collections.abc import Sequence
from typing import Any

from perfedrl.errors import UserError


def parse_settings(texts: Sequence[str]) -> dict[str, Any]:
    """Parse settings NAME=VALUE, in which a value is a number, true or false, a word, or several with commas."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not name or not equals or not value:
            raise UserError(f"--set must be NAME=VALUE, such as length=0.3 or goal=3,2, got {text!r}")
        if name in found:
            raise UserError(f"--set {name} is given twice; expected once")
        parts = [parse_value(part) for part in value.split(",")]
        found[name] = parts[0] if len(parts) == 1 else tuple(parts)
    return found


def parse_value(text: str) -> Any:
    """Parse a number, true or false; anything else is a word."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.strip(), text.strip())

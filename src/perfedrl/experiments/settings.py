"""Settings from TOML files; an error is one sentence about the first mistake."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from perfedrl.errors import UserError, nearest
from perfedrl.registry import abbreviated

Model = TypeVar("Model", bound=BaseModel)


def read_table(path: Path, what: str) -> dict[str, Any]:
    """Read a TOML file; `what` is the kind of file, for error messages."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # editors of Windows write a mark at the beginning
    except FileNotFoundError as error:
        raise UserError(f"there is no {what} {path}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} cannot be read as {article(what)} {what}, since it is not text in UTF-8") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read as {article(what)} {what}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error


def resolve_fleet_file(path: Path, table: dict[str, Any]) -> dict[str, Any]:
    """Resolve the fleet's file, if the table names one, relative to the folder of the TOML file."""
    fleet = table.get("fleet")
    if isinstance(fleet, dict) and isinstance(fleet.get("file"), str) and fleet["file"]:
        fleet["file"] = str(path.parent / fleet["file"])
    return table


def resolve_start(path: Path, table: dict[str, Any]) -> dict[str, Any]:
    """Resolve a run to start from relative to the folder of the TOML file, if it is there."""
    start = table.get("start")
    named = start.get("path") if isinstance(start, dict) else start
    if isinstance(named, str) and start != "per-seed" and (path.parent / named).exists():
        found = str(path.parent / named)
        table["start"] = {**start, "path": found} if isinstance(start, dict) else found
    return table


def validated(model: type[Model], table: Mapping[str, Any], what: str) -> Model:
    """Validate a table with a model; `what` is the kind of table, for error messages."""
    for key in table:
        if key not in model.model_fields:
            raise UserError(f"unknown key {key!r}{nearest(key, model.model_fields)}")
    try:
        return model.model_validate_json(json.dumps(dict(table), default=str), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        if isinstance(first.get("ctx", {}).get("error"), UserError):
            raise first["ctx"]["error"] from None
        where = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise UserError(f"the {what} lacks {where!r}") from error
        message = first["msg"][0].lower() + first["msg"][1:]
        raise UserError(f"{where}: {message}, not {abbreviated(first['input'])}") from error


def article(noun: str) -> str:
    """The indefinite article of a noun."""
    return "an" if noun[0] in "aeiou" else "a"

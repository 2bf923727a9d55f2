"""Settings from TOML, checked: what is wrong is one sentence about the first thing that is."""

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
    """The table in a TOML file; `what` is what it should be."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"there is no {what} {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as {article(what)} {what}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error


def beside(path: Path, table: dict[str, Any]) -> dict[str, Any]:
    """The table with the file that its fleet names looked for in the table's own folder."""
    fleet = table.get("fleet")
    if isinstance(fleet, dict) and isinstance(fleet.get("file"), str) and fleet["file"]:
        fleet["file"] = str(path.parent / fleet["file"])
    return table


def validated(model: type[Model], table: Mapping[str, Any], what: str) -> Model:
    """The settings in a table."""
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
    return "an" if noun[0] in "aeiou" else "a"

"""Imports from modules of the user's own, named `module:attribute`; what goes wrong in them is a `UserError`."""

import importlib
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from perfedrl.errors import FAILURES, UserError, in_one_line


def imported(reference: str, kind: str) -> Any:
    """Import what `module:attribute` names; `kind` is what it should be, for error messages."""
    module = imported_module(reference, kind)
    try:
        found = getattr(module, reference.partition(":")[2])
    except AttributeError as error:
        raise UserError(f"the {kind} {reference!r} cannot be imported: {error}") from error
    check_not_of_python(found, reference, kind)
    return found


def check_not_of_python(found: Any, reference: str, kind: str) -> None:
    """Reject functions and classes of Python's own library, such as those that run commands; they make no parts."""
    home = inspect.getmodule(found) if inspect.isroutine(found) or inspect.isclass(found) else None
    if home is not None and home.__name__.partition(".")[0] in sys.stdlib_module_names:
        raise UserError(f"the {kind} {reference!r} is a part of Python's library; expected code of your own")


def imported_module(reference: str, kind: str) -> ModuleType:
    """Import the module of `module:attribute`; whatever goes wrong in it is a `UserError`."""
    module = reference.partition(":")[0]
    if module.endswith(".py") or os.sep in module:
        named = f"{Path(module).stem}:{reference.partition(':')[2]}"
        raise UserError(
            f"the {kind} {reference!r} names a file; expected module:name, such as {named}, with the file in the "
            "folder of the command or of the config"
        )
    importlib.invalidate_caches()  # a file that is a millisecond old is found too
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"the {kind} {reference!r} cannot be imported: {error}{looked_in(module, error)}") from error
    except FAILURES as error:  # of the user's module, such as a SyntaxError, which says the file and the line
        raise UserError(f"the {kind} {reference!r} cannot be imported: {in_one_line(error)}") from error


def find_modules_in(folder: Path) -> None:
    """Let names `module:attribute` be found in a folder too; installed modules come first."""
    if str(folder.resolve()) not in sys.path:
        sys.path.append(str(folder.resolve()))


def looked_in(module: str, error: Exception) -> str:
    """The folders in which a module was looked for, as the end of a sentence; nothing if it was found but fails."""
    root = module.partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or error.name != root:
        return ""
    installed = {os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, sys.exec_prefix)}
    installed.add(str(Path(__file__).resolve().parents[1]))
    own = [os.path.realpath(path or ".") for path in sys.path]
    folders = [path for path in dict.fromkeys(own) if not any(Path(path).is_relative_to(x) for x in installed)]
    return f"; looked for {root}.py in {', '.join(folders) or 'no folder'} and among installed packages"

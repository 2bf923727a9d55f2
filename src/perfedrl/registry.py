"""Registries: from the name of a part in a config to its factory, with checked parameters."""

import inspect
import json
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import PydanticSchemaGenerationError, TypeAdapter, ValidationError

from perfedrl.errors import UserError, nearest
from perfedrl.own_modules import imported


@dataclass(frozen=True)
class Registry(Mapping[str, Callable[..., Any]]):
    """Factories of one kind by name; `module:attribute` names a user's own factory, without registration.

    A user's own factory is a class of the kind that the registry `makes`, or a function that is not annotated to return
    anything else.
    """

    kind: str
    entries: types.MappingProxyType[str, Callable[..., Any]]
    makes: type = object

    def __getitem__(self, name: str) -> Callable[..., Any]:
        if name in self.entries:
            return self.entries[name]
        if ":" in name:
            return _import(name, self.kind, self.makes)
        raise UserError(f"unknown {self.kind} {name!r}{nearest(name, self.entries)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def resolve(self, name: str, params: Mapping[str, Any], supplied: tuple[str, ...] = ()) -> dict[str, Any]:
        """Check an entry's parameters against its signature and fill in the defaults.

        `supplied` names the arguments that the caller passes when it builds the part, such as a policy's fleet.
        """
        accepted = {key: p for key, p in self.parameters(name).items() if key not in supplied}
        for key in params:
            if key not in accepted:
                raise UserError(f"{self.kind} {name!r} has no parameter {key!r}{nearest(key, accepted)}")
        resolved = {}
        for key, parameter in accepted.items():
            if key in params:
                resolved[key] = _frozen(_checked(params[key], parameter.annotation, f"{self.kind} {name!r}: {key}"))
            elif parameter.default is inspect.Parameter.empty:
                raise UserError(f"{self.kind} {name!r} needs the parameter {key!r}")
            else:
                resolved[key] = _frozen(parameter.default)
        return resolved

    def parameters(self, name: str) -> dict[str, inspect.Parameter]:
        """Return the parameters of an entry, by name."""
        return dict(inspect.signature(self[name], eval_str=True).parameters)


def registry(kind: str, makes: type = object, /, **entries: Callable[..., Any]) -> Registry:
    """Make a registry; underscores in the names become hyphens (`fedavg_pg` is written `fedavg-pg` in a config)."""
    named = {name.replace("_", "-"): factory for name, factory in entries.items()}
    return Registry(kind, types.MappingProxyType(named), makes)


def _import(reference: str, kind: str, makes: type) -> Callable[..., Any]:
    factory = imported(reference, kind)
    if not callable(factory):
        raise UserError(f"the {kind} {reference!r} is a {type(factory).__name__}; expected a function or a class")
    made = factory if inspect.isclass(factory) else inspect.signature(factory, eval_str=True).return_annotation
    if inspect.isclass(made) and made is not inspect.Signature.empty and not issubclass(made, makes):
        raise UserError(
            f"the {kind} {reference!r} makes a {made.__name__}; expected a class or a function that makes a perfedrl "
            f"{makes.__name__}"
        )
    return factory


def _frozen(value: Any) -> Any:
    """Convert nested lists to tuples, so that equal settings compare equal and cannot change."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list | tuple) else value


def _checked(value: Any, annotation: Any, what: str) -> Any:
    """Check a value against a type by the rules of JSON: a list may be a tuple, but "3" and true are no numbers."""
    if annotation is inspect.Parameter.empty:
        return value
    try:
        return TypeAdapter(annotation).validate_json(json.dumps(value, default=str), strict=True)
    except PydanticSchemaGenerationError:
        return value  # a type of the user's own, which the factory must check itself
    except ValidationError as error:
        first = error.errors()[0]
        where = what + "".join(f"[{part}]" for part in first["loc"] if isinstance(part, int))
        raise UserError(
            f"{where} = {abbreviated(first['input'])}: {first['msg'][0].lower()}{first['msg'][1:]}"
        ) from error


def abbreviated(value: Any) -> str:
    """Return a value's repr, cut to 60 characters for use in messages."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

"""Members that a base class declares for its subclasses: what tasks and policies are made of."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from perfedrl.errors import UserError

if TYPE_CHECKING:
    default_property = property
else:

    class default_property:  # noqa: N801
        """A read-only default that a subclass overrides with a field, a class attribute, a property or a method.

        It differs from `property` in two ways, both for subclasses that are dataclasses: a field of the same name can
        be set on an instance, and a field without a default does not take this one, since the class itself does not
        have the attribute, only its instances do. Where the body is only a docstring, the default is None.
        """

        def __init__(self, compute: Callable[[Any], Any]):
            self._compute, self.__doc__ = compute, compute.__doc__

        def __get__(self, instance: Any, owner: type) -> Any:
            if instance is None:
                raise AttributeError(self._compute.__name__)
            return self._compute(instance)


if TYPE_CHECKING:

    def delegated(inner: str) -> Any: ...

else:

    class delegated(property):  # noqa: N801
        """A member that is the member of the same name of another object, methods included.

        `horizon = delegated("task")` in a class makes `x.horizon` the same as `x.task.horizon`. A wrapper states each
        member that it passes on in one such line. Without an annotation it is not a field of a dataclass.
        """

        def __init__(self, inner: str):
            super().__init__(self._look_up)
            self._inner = inner

        def __set_name__(self, owner: type, name: str) -> None:
            self._name, self.__doc__ = name, f"The same as `{self._inner}.{name}`."

        def _look_up(self, instance: Any) -> Any:
            return getattr(getattr(instance, self._inner), self._name)


def undefined(instance: Any, name: str, base: str) -> UserError:
    """The error for a member that every subclass of a base must define."""
    return UserError(f"{type(instance).__name__} must define `{name}`; {base} documents all members")


def members(base: type) -> list[str]:
    """The names of all public members that a base class and its own bases declare, sorted."""
    kinds = [kind for kind in base.__mro__ if kind.__module__.startswith("perfedrl.")]
    return sorted({name for kind in kinds for name in vars(kind) if not name.startswith("_")})

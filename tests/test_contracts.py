"""Members of contracts: delegated ones are those of the inner object, by name."""

import dataclasses

import equinox as eqx
import pytest

from perfedrl.contracts import delegated


class Inner(eqx.Module):
    """An object with a value and a method."""

    size: int

    def scaled(self, factor):
        """Return a multiple of the size."""
        return factor * self.size


class Outer(eqx.Module):
    """A module that delegates both members."""

    inner: Inner

    size = delegated("inner")
    scaled = delegated("inner")


class Doubled(Outer):
    """A module that overrides a delegated method and calls it."""

    def scaled(self, factor):
        """Return twice the inner result."""
        return 2 * super().scaled(factor)


def test_delegated_members_are_those_of_the_inner_object_and_no_fields():
    outer = Outer(Inner(3))
    assert (outer.size, outer.scaled(2), Doubled(Inner(3)).scaled(2)) == (3, 6, 12)
    assert [field.name for field in dataclasses.fields(Outer)] == ["inner"]


def test_delegated_members_are_documented_and_read_only():
    assert Outer.scaled.__doc__ == "The same as `inner.scaled`."
    with pytest.raises(AttributeError):
        Outer(Inner(3)).size = 4

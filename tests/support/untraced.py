"""An agent that JAX cannot trace, as far as an algorithm can tell."""

from typing import Any

import equinox as eqx


class Untraced(eqx.Module):
    """Another agent's estimates, to be asked for in Python."""

    inner: Any

    traceable = False

    def gradient(self, params, key, m):
        return self.inner.gradient(params, key, m)

    def curvature(self, params, v, key, m):
        return self.inner.curvature(params, v, key, m)

    def value(self, params, key, m):
        return self.inner.value(params, key, m)

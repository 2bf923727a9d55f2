"""Look into traced programs."""


def sizes(jaxpr):
    """The size of every intermediate array of a program, inner programs included."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.size for variable in equation.outvars)
        for inner in equation.params.values():
            if hasattr(inner, "jaxpr"):
                yield from sizes(inner.jaxpr)

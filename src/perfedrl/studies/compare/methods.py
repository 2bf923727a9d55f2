"""The compared methods, and how each splits a round's trajectories into batches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

Counts = Mapping[str, int]
Range = tuple[float, float]

STEP: tuple[str, ...] = ("beta",)
STEPS: tuple[str, ...] = ("alpha", "beta")
CLUSTERS = 3


@dataclass(frozen=True)
class Method:
    """One method: an algorithm, its fixed settings, how it splits a round's budget, and its searched settings.

    `split` computes batch sizes from the trajectories per agent and round and the number of local steps. `steps` are
    the searched step sizes, whose ranges the plan gives; `search` has the ranges of further settings. `tables` are
    further tables of the config.
    """

    title: str
    algorithm: str
    split: Callable[[int, int], Counts]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[str, ...] = STEPS
    search: Mapping[str, Range] = field(default_factory=dict)
    tables: Mapping[str, Any] = field(default_factory=dict)


def batches(names: tuple[str, ...], budget: int, local_steps: int, times: int = 1, steps: int | None = None) -> Counts:
    """Equal sizes for the named batches, so that all local steps use the budget; the first is drawn `times` times."""
    taken = local_steps if steps is None else steps
    return {"local_steps": taken} | dict.fromkeys(names, budget // (taken * (len(names) + times - 1)))


def anchored(budget: int, local_steps: int) -> Counts:
    """Fast-FedPG's two rounds: one batch at the anchor, used by the first local step, and one for each other step."""
    m = 2 * budget // local_steps
    return {"local_steps": local_steps, "m": m, "m_anchor": 2 * budget - (local_steps - 1) * m}


def whole(budget: int, _: int) -> Counts:
    """One batch per round, for methods that exchange after each step."""
    return {"m": budget}


def waiting(budget: int, _: int) -> Counts:
    """The batch of three rounds, since AFedPG's agents finish every third tick on average."""
    return {"m": 3 * budget}


def heads(budget: int, local_steps: int) -> Counts:
    """Equal numbers of steps for the head and for the representation."""
    return {"local_steps": local_steps, "head_steps": local_steps, "m": budget // (2 * local_steps)}


def choosing(budget: int, local_steps: int) -> Counts:
    """As many trajectories to try each cluster as there are local steps, and the others for these steps."""
    return {"local_steps": local_steps, "m_choose": local_steps, "m": budget // local_steps - CLUSTERS}


def nothing(*_: int) -> Counts:
    """No batches, for methods that do not train."""
    return {}


one = partial(batches, ("m",))
two = partial(batches, ("m_in", "m_out"))
three = partial(batches, ("m_in", "m_h", "m_out"))
many = partial(batches, ("m",), steps=20)
HESSIAN_FREE = {"curvature": "central-fresh"}

MAML: Mapping[str, Method] = MappingProxyType(
    {
        "per-fedavg-pg": Method("Per-FedAvg-PG, exact", "per-fedavg-pg", three, {"variant": "exact"}),
        "first-order": Method("Per-FedAvg-PG, first-order", "per-fedavg-pg", two, {"variant": "first-order"}),
        "hessian-free": Method("Per-FedAvg-PG, central differences", "per-fedavg-pg", three, tables=HESSIAN_FREE),
        "two-steps": Method(
            "Per-FedAvg-PG, first-order, two steps",
            "per-fedavg-pg",
            partial(two, times=2),
            {"variant": "first-order", "adaptation_steps": 2},
        ),
        "first-order-tuned": Method(
            "Per-FedAvg-PG, first-order, then fine-tuning",
            "per-fedavg-pg",
            two,
            {"variant": "first-order", "deployment_steps": 10},
            steps=(*STEPS, "deployment_alpha"),
        ),
        "sg-mrl": Method("SG-MRL, federated", "sg-mrl", two),
        "sg-mrl-pooled": Method("SG-MRL, centralized", "sg-mrl", partial(two, steps=1)),
        "storm": Method("Per-FedAvg-STORM", "per-fedavg-storm", two),
        "reptile": Method("Reptile", "reptile", one, search={"server_step": (0.1, 1.0)}),
    }
)

PERSONAL: Mapping[str, Method] = MappingProxyType(
    {
        "mixing": Method("mixing, PfoPG", "mixing", partial(one, times=2), search={"weight": (0.05, 0.95)}),
        "mixing-zo": Method(
            "mixing, zeroth-order, ZO-APFPG",
            "mixing",
            partial(one, times=2),
            {"gradient": "zeroth-order", "weight": 0.5},
            search={"weight_rate": (0.01, 0.3)},
        ),
        "clustered": Method("three clusters, IFCA", "clustered", choosing, {"clusters": CLUSTERS}),
        "clustered-tuned": Method(
            "three clusters, then fine-tuning",
            "clustered",
            choosing,
            {"clusters": CLUSTERS, "deployment_steps": 10},
        ),
        "shared-representation": Method("shared representation", "shared-representation", heads),
        "pfedme": Method("pFedMe", "pfedme", one, search={"weight": (0.1, 100.0)}),
        "pmeta-rl": Method("pMeta-RL", "pmeta-rl", one, search={"weight": (0.1, 100.0)}),
        "fine-tuned": Method("FedAvg-PG, then fine-tuning", "fine-tuned", one),
    }
)

SHARED: Mapping[str, Method] = MappingProxyType(
    {
        "fedavg-pg": Method("FedAvg-PG", "fedavg-pg", one),
        "fedadam": Method(
            "FedAvg-PG, Adam at the server",
            "fedavg-pg",
            one,
            search={"server.rate": (0.01, 0.3)},
            tables={"server": {"optimizer": "adam"}},
        ),
        "softmax-fedpg": Method(
            "softmax FedPG, 20 local steps", "softmax-fedpg", many, search={"regularization": (1e-4, 0.1)}
        ),
        "fast-fedpg": Method("Fast-FedPG", "fast-fedpg", anchored),
        "fednpg": Method("FedNPG", "fednpg", whole, search={"entropy": (1e-3, 0.3)}),
        "fedsarsa": Method("FedSARSA", "fedsarsa", one, search={"temperature": (0.01, 1.0)}),
        "afedpg": Method("AFedPG, delays", "afedpg", waiting),
    }
)

ALONE: Mapping[str, Method] = MappingProxyType(
    {
        "local-pg": Method("local training", "local-pg", one, steps=STEP),
        "from-scratch": Method("from scratch", "from-scratch", nothing, steps=("alpha",)),
    }
)

METHODS: Mapping[str, Method] = MappingProxyType({**MAML, **PERSONAL, **SHARED, **ALONE})
"""The library's methods: initializations, other personalization, one shared policy with one step, no federation."""

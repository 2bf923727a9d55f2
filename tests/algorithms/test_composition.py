"""Wrappers are put around an algorithm in one order, and combinations that exclude each other are rejected."""

import itertools

import pytest

import perfedrl as pf
from perfedrl.algorithms import (
    AFedPG,
    Attacked,
    Clustered,
    ControlVariate,
    FastFedPG,
    FedOpt,
    FedPPO,
    Personal,
    Private,
    ProMP,
    Robust,
    Wrapper,
)
from perfedrl.algorithms.aggregation import Median
from perfedrl.algorithms.attacks import SignFlip
from perfedrl.algorithms.composition import CONFLICTS, ORDER, Layer, compose

OWN = pf.FedAvgPG(0.5, 0.3)
LAYERS = {
    Personal: Layer(Personal, {"names": ("normalizer",)}),
    Private: Layer(Private, {"clip": 1.0, "noise": 0.5}),
    Robust: Layer(Robust, {"aggregation": Median()}),
    FedOpt: Layer(FedOpt, {"optimizer": "sgd", "rate": 1.0}),
    ControlVariate: Layer(ControlVariate, {"mode": "round", "total": 4.0}),
    Attacked: Layer(Attacked, {"attack": SignFlip(), "agents": 1}),
}


class Extra(Wrapper):
    """A wrapper that the order does not know."""


def test_every_wrapper_has_a_place_in_the_order():
    assert {kind for kind in Wrapper.__subclasses__() if kind.__module__.startswith("perfedrl.")} == set(ORDER)
    assert list(LAYERS) == list(ORDER)


def test_layers_are_put_around_the_algorithm_from_inside_to_outside():
    made = compose(OWN, [LAYERS[Private], LAYERS[Robust], LAYERS[FedOpt], LAYERS[Attacked]])
    kinds = []
    while isinstance(made, Wrapper):
        kinds.append(type(made))
        made = made.inner
    assert (kinds, made) == ([Attacked, FedOpt, Robust, Private], OWN)
    assert compose(OWN, []) is OWN


@pytest.mark.parametrize(("inner", "outer"), list(itertools.combinations(ORDER, 2)), ids=lambda kind: kind.__name__)
def test_two_layers_in_the_wrong_order_are_rejected(inner, outer):
    with pytest.raises(pf.UserError, match=f"{inner.__name__} goes inside {outer.__name__}"):
        compose(OWN, [LAYERS[outer], LAYERS[inner]])


@pytest.mark.parametrize("kind", ORDER, ids=lambda kind: kind.__name__)
def test_a_layer_that_is_there_twice_is_rejected(kind):
    with pytest.raises(pf.UserError, match=f"at most one {kind.__name__}"):
        compose(OWN, [LAYERS[kind]] * 2)


def test_an_unknown_wrapper_is_rejected():
    with pytest.raises(pf.UserError, match="Extra has no place in the order"):
        compose(OWN, [Layer(Extra, {})])


REJECTED = [
    *[(AFedPG(0.5, 0.3), [kind], {}, "send nothing in some rounds") for kind in (Private, Robust, Attacked)],
    *[(FedPPO(0.5, 0.3), [kind], {}, "send the moments of their optimizer") for kind in (Private, ControlVariate)],
    (ProMP(0.5, 0.3, optimizer_state="reset", anneal=9), [Private], {}, "the number of the round"),
    (OWN, [Private, ControlVariate], {}, "remembers displacements"),
    (OWN, [Robust, ControlVariate], {}, "remembers displacements"),
    (OWN, [ControlVariate, Attacked], {}, "remembers displacements"),
    (FastFedPG(0.5, 0.3), [Personal], {}, "special has uploads of its own"),
    (AFedPG(0.5, 0.3), [Personal], {}, "special has uploads of its own"),
    (Clustered(0.5, 0.3), [Personal], {}, "special has uploads of its own"),
    *[
        (Clustered(0.5, 0.3), [kind], {}, "choose one of several initializations")
        for kind in (Private, Robust, FedOpt, ControlVariate)
    ],
    (OWN, [FedOpt], {"averages_moments": True}, "round by round"),
    (OWN, [ControlVariate], {"averages_moments": True}, "round by round"),
]


@pytest.mark.parametrize(("algorithm", "kinds", "options", "reason"), REJECTED)
def test_layers_that_exclude_each_other_are_rejected(algorithm, kinds, options, reason):
    with pytest.raises(pf.UserError, match=reason):
        compose(algorithm, [LAYERS[kind] for kind in kinds], name="special", **options)


def test_every_conflict_and_every_wrapper_that_it_excludes_is_tested():
    tested = [(conflict.reason, kind) for conflict in CONFLICTS for kind in conflict.excludes]
    for reason, kind in tested:
        assert any(kind in kinds and part.removeprefix("special ") in reason for _, kinds, _, part in REJECTED)


def test_what_is_not_excluded_is_accepted():
    compose(OWN, [LAYERS[kind] for kind in (Personal, Private, Robust, FedOpt, Attacked)])
    compose(OWN, [LAYERS[kind] for kind in (Personal, FedOpt, ControlVariate)])
    compose(AFedPG(0.5, 0.3), [LAYERS[FedOpt]])
    compose(Clustered(0.5, 0.3), [LAYERS[Attacked]], averages_moments=True)
    compose(OWN, [LAYERS[kind] for kind in (Private, Robust, Attacked)], averages_moments=True)

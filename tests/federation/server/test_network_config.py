"""The config of a networked run: its default aggregation, where that is the mean, and how both are told."""

import numpy as np
import pytest
from real_fleet import MDPS, config
from tiny_config import BASE, changed

import perfedrl as pf
from perfedrl.algorithms import ServerState
from perfedrl.algorithms.base import average
from perfedrl.errors import UserError
from perfedrl.experiments.config import make_config, parse_config
from perfedrl.federation.server.network_config import aggregation_sentence, config_of, networked

MEAN, DEFAULT = {"name": "mean"}, {"name": "geometric-median", "iterations": 64, "smoothing": 1e-4}


def test_a_network_takes_the_geometric_median_and_its_config_says_so():
    plain, robust = config("net"), config("net", aggregation="geometric-median")
    derived = networked(plain)
    assert derived.aggregation == DEFAULT
    assert derived.digest == robust.digest != plain.digest
    assert config_of(derived.to_toml()).aggregation == DEFAULT
    assert networked(derived) is derived
    assert networked(robust) is robust


def test_the_mean_is_one_setting_away_and_keeps_the_digest_of_a_config_without_the_table():
    plain, mean = config("net"), config("net", aggregation="mean")
    assert networked(mean) is mean
    assert mean.aggregation == MEAN
    assert mean.digest == plain.digest
    read = config_of(mean.to_toml())
    assert networked(read).aggregation == MEAN, "what was chosen stays chosen where the text is read again"
    weighted = config("net", aggregation={"name": "mean", "weights": [1, 2, 1]})
    assert networked(weighted).experiment.weights == (1, 2, 1)


class OwnServer(pf.FedAvgPG):
    """An algorithm whose server looks at single uploads."""

    def server(self, state, uploads, weights):
        return ServerState(average(uploads, weights))


def own(alpha: float = 0.5, beta: float = 0.3) -> OwnServer:
    return OwnServer(alpha, beta)


CLUSTERED = {"name": "clustered", "alpha": 0.5, "beta": 0.3, "m": 3, "m_choose": 3}
AVERAGED = {
    "two agents": ({"fleet": {**MDPS, "agents": 2}}, "fewer than 3 agents take part"),
    "two of four": ({"fleet": {**MDPS, "agents": 4}, "participation": 0.5}, "fewer than 3 agents take part"),
    "clusters": ({"algorithm": CLUSTERED}, "the one in clustered"),
    "own server": ({"algorithm": {"name": "test_network_config:own"}}, "a server step of its own"),
}


@pytest.mark.parametrize(("changes", "why"), AVERAGED.values(), ids=AVERAGED)
def test_where_no_other_aggregation_fits_the_default_is_the_mean(changes, why):
    plain = config("net", **changes)
    derived = networked(plain)
    assert derived.aggregation == MEAN
    assert derived.digest == plain.digest
    said = aggregation_sentence(plain, derived)
    assert said.startswith("uploads are combined by their mean: ")
    assert why in said


def test_every_other_algorithm_with_uploads_like_its_messages_takes_the_default():
    for name in ("fedavg-pg", "reptile", "promp", "pfedme", "sg-mrl", "per-fedavg-storm"):
        table = {"name": name, "alpha": 0.5, "beta": 0.3}
        assert networked(parse_config({**BASE, "algorithm": table})).aggregation == DEFAULT


def test_the_sentence_says_which_aggregation_and_how_to_change_it():
    plain, median = config("net"), config("net", aggregation="median")
    assert aggregation_sentence(plain, networked(plain)) == (
        "uploads are combined by their geometric median: a minority of hostile agents cannot move it far; "
        '[aggregation] name = "mean" in the config takes their mean'
    )
    assert aggregation_sentence(median, networked(median)) == (
        "uploads are combined by their median, as the config says"
    )
    begun = config("net", aggregation="mean")
    assert "as when this run began; --restart" in aggregation_sentence(plain, begun)


@pytest.mark.parametrize(
    ("table", "why"), [("mediam", "unknown aggregation"), ({"name": "krum"}, "at least 5 training agents")]
)
def test_a_wrong_aggregation_is_an_error_before_anything_is_sent(table, why):
    with pytest.raises(UserError, match=why):
        networked(parse_config(changed(seeds=1, aggregation=table)))


def test_a_mean_that_is_named_trains_as_one_that_is_not():
    one, other = (make_config(changed(**more)) for more in ({}, {"aggregation": "mean"}))
    assert type(one.experiment.algorithm) is type(other.experiment.algorithm)
    assert one.trains_with == other.trains_with
    assert "aggregation" not in one.to_toml()
    alone = changed(algorithm={"name": "local-pg"}, aggregation="mean")
    alone["algorithm"] = {"name": "local-pg", "beta": 0.1}
    np.testing.assert_equal(make_config(alone).experiment.weights, None)

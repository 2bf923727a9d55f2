"""Tables of Gymnasium's spaces: they flatten observations and convert actions as Gymnasium and the fleet do."""

import numpy as np
import pytest
from gymnasium import spaces

from perfedrl.envs.gym.space_tables import action_table, observation_table
from perfedrl.saved_policies.spaces import Spaces

OBSERVATIONS = {
    "box": spaces.Box(-1, 1, (3,)),
    "image": spaces.Box(0, 255, (4, 2, 3), np.uint8),
    "number": spaces.Box(-1, 1, ()),
    "discrete": spaces.Discrete(4, start=-1),
    "several discrete": spaces.MultiDiscrete([2, 3, 4], start=[0, 5, -1]),
    "grid of discrete": spaces.MultiDiscrete(np.asarray([[2, 3], [4, 5]])),
    "binary": spaces.MultiBinary((2, 3)),
    "dictionary": spaces.Dict(
        {"z": spaces.Box(-1, 1, (2,)), "a": spaces.Discrete(3), "b": spaces.Dict({"c": spaces.MultiBinary(2)})}
    ),
    "tuple": spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 1, (2, 2))]),
}


@pytest.mark.parametrize("name", OBSERVATIONS)
def test_observations_are_flattened_as_by_gymnasium(name):
    space = OBSERVATIONS[name]
    space.seed(0)
    table = Spaces.model_validate_json(
        Spaces(
            observations=observation_table(space), actions=action_table(spaces.Discrete(2), scale=True)
        ).model_dump_json()
    ).observations
    assert table.flat_size == spaces.flatdim(space)
    for _ in range(5):
        obs = space.sample()
        np.testing.assert_array_equal(table.flatten(obs), spaces.flatten(space, obs).astype(np.float32))


def test_observations_of_rare_spaces_are_given_flat():
    space = spaces.Text(5)
    table = observation_table(space)
    flat = spaces.flatten(space, "ab")
    np.testing.assert_array_equal(table.flatten(flat), flat)


@pytest.mark.parametrize(
    ("space", "obs"),
    [
        (spaces.Discrete(3), 3),
        (spaces.Discrete(3), [1, 1]),
        (spaces.MultiDiscrete([2, 2]), [0, -1]),
        (spaces.Box(0, 1, (2,)), [0.1, 0.2, 0.3]),
        (OBSERVATIONS["dictionary"], {"z": [0.0, 0.0]}),
        (OBSERVATIONS["tuple"], (1,)),
    ],
)
def test_observations_outside_the_space_are_rejected(space, obs):
    with pytest.raises((ValueError, KeyError)):
        observation_table(space).flatten(obs)

# SPDX-License-Identifier: Apache-2.0
"""The shape of a draft tree: defaults, capacity, limits and validation of TreeConfig."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gto_hf.tree import TreeConfig


MODEST = settings(max_examples=60, deadline=None)
shapes = st.tuples(st.integers(1, 9), st.integers(1, 9))


def capacity_by_counting(depth, top_k):
    """The root has top_k children; each of the later levels expands top_k nodes into top_k children."""
    count = 0
    for level in range(1, depth + 1):
        expanded = 1 if level == 1 else top_k
        count += expanded * top_k
    return count


def test_config_without_arguments_is_the_default_tree():
    config = TreeConfig()
    assert (config.depth, config.top_k, config.total_tokens) == (8, 10, 60)
    assert config.capacity == 10 + 7 * 100


def test_config_with_positional_arguments_takes_depth_then_top_k_then_total():
    assert TreeConfig(3, 4, 5) == TreeConfig(depth=3, top_k=4, total_tokens=5)


@MODEST
@given(shapes)
def test_capacity_for_any_shape_is_the_number_of_scored_nodes(shape):
    depth, top_k = shape
    assert TreeConfig(depth=depth, top_k=top_k, total_tokens=1).capacity == capacity_by_counting(depth, top_k)


@MODEST
@given(shapes)
def test_total_tokens_at_capacity_is_accepted_and_one_more_raises(shape):
    depth, top_k = shape
    full = capacity_by_counting(depth, top_k)
    assert TreeConfig(depth=depth, top_k=top_k, total_tokens=full).total_tokens == full
    with pytest.raises(ValueError) as error:
        TreeConfig(depth=depth, top_k=top_k, total_tokens=full + 1)
    assert str(full + 1) in str(error.value)
    assert str(full) in str(error.value)


@pytest.mark.parametrize("name", ["depth", "top_k", "total_tokens"])
@pytest.mark.parametrize("value", [0, -7, True, False, 2.0, 2.5, "3", None])
def test_config_with_a_value_that_is_no_positive_int_raises_and_names_it(name, value):
    with pytest.raises(ValueError) as error:
        TreeConfig(**{"depth": 4, "top_k": 4, "total_tokens": 4, name: value})
    assert name in str(error.value)
    assert str(value) in str(error.value)


@pytest.mark.parametrize("name", ["depth", "top_k", "total_tokens"])
def test_config_when_a_field_is_assigned_stays_frozen(name):
    config = TreeConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, 3)
    assert config == TreeConfig()


def test_config_when_equal_has_an_equal_hash():
    assert hash(TreeConfig(3, 4, 5)) == hash(TreeConfig(3, 4, 5))
    assert TreeConfig(3, 4, 5) != TreeConfig(3, 4, 6)


@MODEST
@given(shapes, st.data())
def test_limited_for_any_depth_cuts_levels_and_caps_total_tokens(shape, data):
    depth, top_k = shape
    total = data.draw(st.integers(1, capacity_by_counting(depth, top_k)))
    limit = data.draw(st.integers(1, depth + 3))
    config = TreeConfig(depth=depth, top_k=top_k, total_tokens=total)
    limited = config.limited(limit)
    if limit >= depth:
        assert limited == config
    else:
        assert limited.depth == limit
        assert limited.top_k == top_k
        assert limited.total_tokens == min(total, capacity_by_counting(limit, top_k))
    assert config == TreeConfig(depth=depth, top_k=top_k, total_tokens=total)


@pytest.mark.parametrize("depth", [0, -1])
def test_limited_to_no_levels_raises(depth):
    with pytest.raises(ValueError):
        TreeConfig().limited(depth)


@MODEST
@given(shapes)
def test_to_dict_for_any_config_gives_back_the_same_config(shape):
    config = TreeConfig(depth=shape[0], top_k=shape[1], total_tokens=shape[1])
    assert config.to_dict() == {"depth": shape[0], "top_k": shape[1], "total_tokens": shape[1]}
    assert TreeConfig(**config.to_dict()) == config

"""The states of real optimisers, in chains that have changed since they were saved."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqx_ckpt
from eqx_ckpt.interop import optax_transform
from helpers import assert_same


PARAMS = {
    "layers": [
        {"w": jnp.linspace(-1, 1, 6).reshape(2, 3), "count": jnp.ones(3)},
        {"w": jnp.linspace(2, 1, 3).reshape(3, 1), "count": jnp.ones(1)},
    ]
}
OPTIMISERS = {
    "adabelief": optax.adabelief,
    "adafactor": lambda lr: optax.adafactor(lr, min_dim_size_to_factor=2),
    "adagrad": optax.adagrad,
    "adam": optax.adam,
    "adamw": optax.adamw,
    "amsgrad": optax.amsgrad,
    "lion": optax.lion,
    "novograd": optax.novograd,
    "rmsprop": lambda lr: optax.rmsprop(lr, centered=True, momentum=0.9),
    "sgd": lambda lr: optax.sgd(lr, momentum=0.9, nesterov=True),
    "yogi": optax.yogi,
}


def labels(params):
    return {"layers": ["first", "second"]}


CHANGES = {
    "added": lambda make: optax.chain(
        optax.clip(100.0), optax.chain(optax.add_decayed_weights(0.0), make(0.1))
    ),
    "named": lambda make: optax.named_chain(
        ("clip", optax.clip(100.0)), ("trace", make(0.1)), ("mu", optax.scale(1.0))
    ),
    "masked": lambda make: optax.masked(make(0.1), True),
    "labelled": lambda make: optax.multi_transform(
        {"first": make(0.1), "second": make(0.1)}, labels
    ),
    "accumulated": lambda make: optax.MultiSteps(
        make(0.1), 1
    ).gradient_transformation(),
    "injected": lambda make: optax.inject_hyperparams(make)(0.1),
    "finite": lambda make: optax.apply_if_finite(make(0.1), 3),
    "conditional": lambda make: optax.chain(
        optax.conditionally_mask(make(0.1), lambda _: jnp.array(True)),
        optax.scale(1.0),
    ),
    "scheduled": lambda make: make(optax.constant_schedule(0.1)),
}


def grads(i):
    return jax.tree.map(lambda x: jnp.cos(x * i) / (1 + i**2), PARAMS)


def trained(optimiser, steps=3):
    state = optimiser.init(PARAMS)
    for i in range(steps):
        _, state = optimiser.update(grads(i), state, PARAMS)
    return state


def is_close(a, b):
    same = jax.tree.map(lambda x, y: np.allclose(x, y, rtol=1e-5, atol=1e-7), a, b)
    return all(jax.tree.leaves(same))


def restored(old, like, prefix="", **how: Any):
    """`old` in the structure of `like`, of which only what is new is kept."""
    transform = optax_transform(like, prefix, **how)
    return eqx_ckpt.interop.from_state_dict(
        like,
        transform(eqx_ckpt.interop.to_state_dict(old)),
        missing="keep",
        unexpected="ignore",
    )


def next_update(optimiser, state):
    return optimiser.update(grads(3), state, PARAMS)[0]


# Each optimiser with two of the changes, and each change with two optimisers, at least.
PAIRS = [
    (name, change)
    for i, name in enumerate(OPTIMISERS)
    for j, change in enumerate(CHANGES)
    if (i + j) % 4 == 0
]


@pytest.mark.parametrize(("name", "change"), PAIRS)
def test_the_next_step_is_the_same(name, change):
    make = OPTIMISERS[name]
    plain, changed = make(0.1), CHANGES[change](make)
    old = trained(plain)
    expected = next_update(plain, old)
    assert not is_close(next_update(plain, plain.init(PARAMS)), expected)
    new = restored(old, changed.init(PARAMS))
    assert is_close(next_update(changed, new), expected)
    if change != "labelled":
        # And back: what the wrapper had is left out.
        assert_same(restored(new, plain.init(PARAMS)), old)


def test_a_state_that_has_not_changed():
    optimiser = optax.chain(optax.adam(0.1), optax.adam(0.1), optax.scale_by_adam())
    old = trained(optimiser)
    assert_same(restored(old, optimiser.init(PARAMS)), old)


def test_from_disk(tmp_path):
    optimiser = CHANGES["labelled"](optax.adam)
    old = {"params": PARAMS, "opt": trained(optax.adam(0.1))}
    eqx_ckpt.tree_serialise_leaves(tmp_path / "a", old)
    like = {"params": PARAMS, "opt": optimiser.init(PARAMS)}
    transform = optax_transform(like, "opt")
    found = eqx_ckpt.tree_match(tmp_path / "a", like, transform=transform)
    assert found.leaves["opt/inner_states/first/inner_state/0/count"].origin == (
        "opt/0/count",
    )
    new = eqx_ckpt.tree_deserialise_leaves(tmp_path / "a", like, transform=transform)
    assert is_close(
        next_update(optimiser, new["opt"]), next_update(optax.adam(0.1), old["opt"])
    )
    like = {"params": PARAMS, "opt": optax.chain(*[optax.adam(0.1)] * 2).init(PARAMS)}
    transform = optax_transform(like, "opt")
    with pytest.raises(eqx_ckpt.LeafMismatchError, match=r"'opt/1/0/count': 'opt/0/c"):
        eqx_ckpt.tree_match(tmp_path / "a", like, transform=transform)


def test_a_schedule_goes_on():
    schedule = optax.linear_schedule(0.1, 0.2, 10)
    plain = optax.adam(schedule)
    injected = optax.inject_hyperparams(optax.adam)(schedule)
    old = trained(plain)
    new = restored(old, injected.init(PARAMS))
    assert is_close(next_update(injected, new), next_update(plain, old))
    assert_same(restored(new, plain.init(PARAMS)), old)


def test_what_is_ambiguous_is_listed():
    like = optax.chain(optax.adam(0.1), optax.adam(0.1)).init(PARAMS)
    old = trained(optax.adam(0.1))
    with pytest.raises(eqx_ckpt.LeafMismatchError) as error:
        restored(old, like)
    text = str(error.value)
    assert "- '0/0/mu/layers/0/w': '0/mu/layers/0/w'.\n" in text
    assert "- '1/0/count': '0/count'.\n" in text
    assert "`choose={" in text
    new = restored(old, like, choose={"0": "", "1": None})
    assert_same(new, (old, like[1]))
    assert_same(restored(old, like, choose={"0": None, "1/0": "0"}), (like[0], old))


def test_two_counts_for_one_are_ambiguous():
    old = trained(CHANGES["labelled"](optax.adam))
    like = optax.adam(0.1).init(PARAMS)
    first, second = (f"inner_states/{x}/inner_state/0/count" for x in old.inner_states)
    with pytest.raises(eqx_ckpt.LeafMismatchError) as error:
        restored(old, like)
    assert f"- '0/count': {first!r} or {second!r}.\n" in str(error.value)
    new = restored(old, like, choose={"0/count": second})
    expected = next_update(CHANGES["labelled"](optax.adam), old)
    assert is_close(next_update(optax.adam(0.1), new), expected)


def test_a_count_is_not_taken_for_that_of_another_link():
    old = trained(optax.adam(0.1))
    like = optax.sgd(optax.constant_schedule(0.1)).init(PARAMS)
    assert_same(restored(old, like), like)
    # It would have the name of one that it is not.
    like = optax.chain(optax.ema(0.9), optax.sgd(0.1, momentum=0.9)).init(PARAMS)
    state = optax_transform(like)(eqx_ckpt.interop.to_state_dict(old))
    assert state[0].keys().isdisjoint(["count"])
    assert state["unused"][0]["count"] == 3
    both = optax.chain(*[optax.scale_by_schedule(lambda x: 1.0)] * 2)
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="'1/count': '1/count'"):
        restored(trained(optax.adam(lambda x: 0.1)), both.init(PARAMS))


def test_what_is_new_or_left_over_is_an_error():
    like = optax.amsgrad(0.1).init(PARAMS)
    old = trained(optax.sgd(0.1, momentum=0.9))
    state = optax_transform(like)(eqx_ckpt.interop.to_state_dict(old))
    with pytest.raises(eqx_ckpt.LeafMismatchError) as error:
        eqx_ckpt.interop.from_state_dict(like, state)
    assert "'0/nu_max/layers/0/w'" in str(error.value)
    assert "'0/trace/layers/0/w'" in str(error.value)


def test_a_part_of_a_tree_and_of_another_model():
    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    params = eqx.filter(model, eqx.is_inexact_array)
    old = {"model": model, "opt": optax.adam(0.1).init(params), "d": PARAMS, "n": 3}
    changed = optax.MultiSteps(optax.adam(0.1), 2).init(params)
    like = {**old, "opt": changed}
    new = restored(old, like, "opt")
    assert_same(new["model"], model)
    assert_same(new["opt"].inner_opt_state, old["opt"])
    with pytest.raises(eqx_ckpt.LeafMismatchError, match="below 'optimiser'"):
        restored(old, like, "optimiser")


@pytest.mark.parametrize(
    ("choose", "what"),
    [
        ({"0/nothing": None}, "'0/nothing' is not .* in `like`"),
        ({"0/mu": "0/nothing"}, "'0/nothing' is not .* in the checkpoint"),
    ],
)
def test_wrong_choices(choose, what):
    like = optax.adam(0.1).init(PARAMS)
    with pytest.raises(eqx_ckpt.LeafMismatchError, match=what):
        restored(like, like, choose=choose)


class Mine(NamedTuple):
    momentum: Any
    count: Any


def test_states_of_ones_own():
    like = optax.chain(optax.identity(), optax.clip(1.0)).init(PARAMS)
    mine = Mine(PARAMS, jnp.array(4))
    new = restored((mine,), (like, (Mine(grads(0), jnp.array(0)),)))
    assert_same(new, (like, (mine,)))

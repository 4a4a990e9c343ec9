"""`--adapt.critic_groups generated`: which samples the critic trains on, and their returns."""

import math
from collections import Counter

import numpy as np
import pytest
from fake_stack import SOURCES, World, digest, responses_to, rows_of, trained
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_rules import by_definition

GENERATED = {"algorithm": "ba_ppo", "adapt.critic_groups": "generated", "adapt.max_failed_share": 1}


def samples_of(experiences):
    """The tokens of each sample, counted."""
    return Counter(tokens for tokens, *_ in rows_of(experiences))


def generated_in(run, step):
    """The tokens of each response that a step generated, counted; without groups that have no reward."""
    result = Counter()
    for request in run.requests:
        rewards = [run.reward(request.prompt, request.weights, n) for n in range(4)]
        if request.step == step and None not in rewards:
            result += Counter(responses_to(request))
    return result


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    delay=st.integers(1, 3), again=st.integers(0, 2), capacity=st.integers(1, 5),
    ranks=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    scheme=st.sampled_from(["range", "none", "uniform"]), broken=st.integers(0, 3), seed=st.integers(0, 99),
    limit=st.sampled_from([None, 0.0]), epochs=st.integers(1, 2),
)  # fmt: skip
def test_the_critic_trains_once_on_all_that_a_random_step_generated(
    world, delay, again, capacity, ranks, scheme, broken, seed, limit, epochs
):
    """With what is replayed. Of a step whose groups are finite and have rewards, nothing else is left out."""
    words = {"adapt.rollout_delay": delay, "adapt.reevaluate_every": again, "adapt.batch_size": capacity,
             "adapt.filter": scheme, "train.seed": seed, "adapt.max_shift_fresh": limit, "adapt.critic_epochs": epochs,
             "actor.num_gpus_per_node": ranks[0], "critic.num_gpus_per_node": ranks[1],
             "train.batch_size": 12, "train.micro_batch_size": 1}  # fmt: skip
    run = world(**GENERATED | words)
    run.reward = lambda prompt, *about: None if digest(prompt, seed) % 8 < broken else World.reward(run, prompt, *about)
    run.trainer.fit()
    batches, taught = dict(run.trained), dict(run.taught)  # of a step, the last one that was sent counts
    for step, row in enumerate(run.metrics()):
        assert row["groups/nonfinite"] == 0
        wanted = generated_in(run, step)
        actor, critic = (samples_of(given.get(step, [])) for given in (batches, taught))
        assert critic.total() == wanted.total() + 4 * row["groups/replayed"]
        assert not wanted - critic and not actor - critic  # all of both, and nothing twice
        assert actor.total() == 4 * sum(row[f"groups/{source}"] for source in SOURCES)
        assert row["tokens/critic"] == epochs * sum((len(tokens) - 2) * count for tokens, count in critic.items())
    assert run.updates["critic"] == sum(bool(row["tokens/critic"]) for row in run.metrics())


def test_the_actors_batch_does_not_change(fitted):
    """The values of the fake critic depend only on the number of its updates."""
    run, plain = (fitted(**GENERATED | {"adapt.critic_groups": groups}) for groups in ("generated", "batch"))
    assert all(row["groups/fresh"] + row["groups/replayed"] for row in run.metrics())
    assert sum(row["groups/filtered"] for row in run.metrics())
    assert trained(run, 0) == trained(plain, 0)
    ours, theirs = ([row["tokens/critic"] for row in one.metrics()] for one in (run, plain))
    assert theirs == [row["tokens/trained"] for row in plain.metrics()] and sum(ours) > sum(theirs)


def test_a_group_that_is_not_finite_is_left_out(fitted):
    """Also one of the dropped groups, if the actor passes them."""
    run = fitted(**GENERATED, **{"algo.kl.init_coef": 0.02, "rollout.batch_size": 8}, spoilt={5, 6, 7})
    assert sum(row["groups/nonfinite"] for row in run.metrics())
    for step, experiences in run.taught:
        assert all(e.returns[e.action_mask.bool()].isfinite().all() for e in experiences)
        assert not any({5, 6, 7} & set(tokens) for tokens in samples_of(dict(run.taught)[step]))


@pytest.mark.parametrize("words", [
    {},
    {"adapt.critic_lambd": 0.8},
    {"adapt.critic_lambd": 0.8, "algo.kl.init_coef": 0.1},
    {"adapt.critic_lambd": 0.8, "algo.kl.init_coef": 0.1, "adapt.kl_target": "behaviour"},
    {"adapt.critic_lambd": 0.8, "algo.kl.init_coef": 0.1, "algo.kl.use_loss": True, "algo.kl.estimator": "k2"},
    {"adapt.critic_lambd": 0.8, "adapt.returns": "vtrace"},
    {"adapt.returns": "vtrace", "algo.kl.init_coef": 0.1, "algo.kl.use_loss": True, "algo.kl.estimator": "k2"},
    {"adapt.returns": "vtrace", "algo.kl.init_coef": 0.1, "adapt.kl_target": "behaviour"},
], ids=lambda words: " ".join(map(str, words.values())))  # fmt: skip
def test_returns_of_dropped_groups_are_made_as_those_of_the_batch(world, words):
    """And the actor and the reference model pass them only if they must."""
    run = world(**GENERATED | {"adapt.rollout_delay": 2, "algo.kl.estimator": "k1"} | words)
    passed, updates = [], {}
    forward, fit = run.groups["actor"].forward, run.groups["critic"].workers[0].fit

    def watched_forward(sequences):
        passed.extend((run.step, tuple(row[row != 0].tolist())) for row in sequences)
        return forward(sequences)

    def watched_fit(**more):
        updates[run.step] = dict(run.updates)
        return fit(**more)

    run.groups["actor"].forward, run.groups["critic"].workers[0].fit = watched_forward, watched_fit
    run.trainer.fit()
    kl, adapt, checked, asked, compared = run.args.algo.kl, run.args.adapt, 0, 0, 0
    referred = {(step, tuple(row)) for step, row in run.referred}
    coefficient = 0.0 if kl.use_loss else kl.init_coef
    for step, experiences in dict(run.taught).items():
        actor, before = samples_of(dict(run.trained).get(step, [])), updates[step]
        behind = {tokens: request.weights for request in run.requests if request.step == step
                  for tokens in responses_to(request)}  # fmt: skip
        for tokens, reward, values, returns in rows_of(experiences, "values", "returns"):
            if tokens in actor:
                continue
            today, alpha, reference = (
                run.log_probs([*tokens], weights)[1:] for weights in (before["actor"], behind[tokens], -1)
            )
            target = alpha if adapt.kl_target == "behaviour" else reference
            shaped = [-coefficient * (one - other) for one, other in zip(today, target, strict=True)]
            shaped[-1] += reward
            moved = [one - other if adapt.returns == "vtrace" else 0 for one, other in zip(today, alpha, strict=True)]
            about = values, shaped, moved, [True] * len(values), 1.0
            _, wanted = by_definition(*about, adapt.critic_lambd or 1.0)  # Eq. 1 of arXiv 1802.01561
            assert returns == pytest.approx(wanted, abs=1e-5)
            assert values == pytest.approx([math.sin(token + before["critic"]) for token in tokens[2:]], abs=1e-6)
            checked, asked = checked + 1, asked + ((step, tokens) in passed)
            compared += (step, tokens) in referred
    assert checked and bool(asked) == bool(coefficient or adapt.returns == "vtrace")
    assert bool(compared) == bool(coefficient and adapt.kl_target == "reference")


def test_an_empty_batch_trains_only_the_critic(fitted):
    run = fitted(**GENERATED, reward=lambda *_: 1.0)
    assert run.updates == {"actor": 0, "critic": 8} and not run.trained
    assert run.trainer.state.step == 8 and run.trainer.state.weights_since == 0
    for row in run.metrics():
        assert row["skipped_update"] == 1 and row["critic_loss"] > 0 and row["groups/filtered"] == 4
        assert {"timing/make_experience", "timing/ppo_train"} <= row.keys()


def test_explained_variance_of_all_groups_by_numpy(fitted):
    run = fitted(**GENERATED)
    for (_, experiences), row in zip(run.taught, run.metrics(), strict=True):
        rows = rows_of(experiences, "values", "returns")
        values, returns = (np.concatenate([row[place] for row in rows]) for place in (2, 3))
        wanted = 1 - (returns - values).var() / returns.var()
        assert row["value/explained_variance_generated"] == pytest.approx(wanted, rel=1e-5)

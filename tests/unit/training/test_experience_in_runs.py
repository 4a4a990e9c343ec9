"""What the batches of whole runs on the fake stack are trained with: errors, reference log-probs, policies, reviews."""

from collections import Counter

import numpy as np
import pytest
import torch
from fake_stack import SOURCES, STATES, Engine, digest, responses_to

from bapo_openrlhf.record.run_record import read_groups
from bapo_openrlhf.training.trainer import accounts
from bapo_openrlhf.training.trainer import experience as experience_module


class TestObserve:
    @pytest.mark.parametrize("limit", [1, 0.0035])
    def test_the_method_hears_how_far_each_group_is_before_it_is_trained_on(self, world, limit):
        run = world(prompts=40, **{"adapt.max_shift_fresh": limit, "adapt.max_shift_replayed": limit})
        heard, forward, method = [], run.trainer.experience_maker.forward, run.trainer.method
        passes, dropped = [], 0

        def spy(origins):
            passes.append((origins, forward(origins)))
            return passes[-1][1]

        run.trainer.experience_maker.forward = spy
        method.observe_distances = lambda step, distances: heard.append((step, distances, run.updates["actor"]))
        run.trainer.fit()
        rows = run.metrics()
        trained = np.cumsum([0, *("skipped_update" not in row for row in rows)])  # updates before each step
        assert len(heard) == len(passes) and any(row["groups/replayed"] for row in rows)
        for number, ((step, distances, updates), (origins, passed)) in enumerate(zip(heard, passes, strict=True)):
            assert updates == trained[step] >= number - 1
            groups = list(dict.fromkeys(origin.group for origin in origins))
            assert list(distances) == groups
            for group in groups:
                places = [n for n, origin in enumerate(origins) if origin.group is group]
                lost = np.maximum(0, 1 - np.exp(passed.log_ratios[places]))
                current = trained[group.weights_version] == updates
                assert distances[group] == pytest.approx(0 if current else lost.mean(), abs=1e-12)
            dropped += len(groups) - int(sum(rows[step][f"groups/{s}"] for s in ("fresh", "reevaluated", "replayed")))
        assert any(tv > 0 for _, distances, _ in heard for tv in distances.values())
        assert (dropped > 0) is (limit < 1)


class TestReference:
    METHODS = (
        {"algo.kl.use_loss": True, "algo.kl.estimator": "k3"},
        {"adapt.method": "bapo_bound", "algorithm": "ba_ppo"},
        pytest.param({"adapt.method": "remix", "adapt.batch_size": 8}, marks=pytest.mark.slow),
        pytest.param({"adapt.method": "dots", "adapt.batch_size": 8}, marks=pytest.mark.slow),
        pytest.param({"adapt.method": "arpo"}, marks=pytest.mark.slow),
        {"adapt.method": "repo", "adapt.batch_size": 8},
        {"adapt.method": "exgrpo", "adapt.batch_size": 8, "adapt.options": "start_above=0"},
    )

    @pytest.mark.parametrize("words", METHODS, ids=lambda words: " ".join(map(str, words.values())))
    def test_is_asked_once_for_each_response(self, fitted, words):
        again = words.get("adapt.method") in ("arpo", "exgrpo", "repo")  # they replay responses to prompts drawn again
        more = {"train.num_episodes": 6, "adapt.reevaluate_every": 1} if again else {}
        sizes = {"prompts": 8, "reward": TestMixedGroups.reward} if again else {"prompts": 24}
        run = fitted(**{"algo.kl.init_coef": 0.02} | words | more | sizes)
        generated = Counter(tokens for request in run.requests for tokens in responses_to(request))
        assert not Counter(tuple(tokens) for _, tokens in run.referred) - generated
        rows = [row for row in run.metrics() if "skipped_update" not in row]
        for row in rows:
            new = sum(len(tokens) - 2 for at, tokens in run.referred if at == row["step"] - 1)
            assert row["tokens/reference_kept"] == row["tokens/trained"] - new
        assert sum(row["tokens/reference_kept"] for row in rows) > 0

    def test_says_which_model_it_is(self, world):
        run = world(**{"algo.kl.init_coef": 0.02, "rollout.temperature": 0.7})
        assert run.trainer.experience_maker.reference_name == "model at temperature 0.7"


class TestMixedGroups:
    """Groups with a stored response among those of this step: each goes by the weights that generated it."""

    @staticmethod
    def rounding(weights: int) -> float:
        """What the engines' log-probs differ from the actor's by: it tells weights apart; exact in float32."""
        return 2.0**-10 + weights * 2.0**-16

    @staticmethod
    def reward(prompt: str, weights: int, sample: int) -> float:
        """Now and then all of a group fail."""
        return float(digest("mixed", prompt, weights, sample) % 8 >= 6)

    @pytest.mark.parametrize(("method", "delay", "algorithm"), [
        ("arpo", 2, "ba_ppo"),
        ("exgrpo", 3, "bapo_grpo"),
        pytest.param("arpo", 1, "bapo_grpo", marks=pytest.mark.slow),
        pytest.param("exgrpo", 1, "ba_ppo", marks=pytest.mark.slow),
    ])  # fmt: skip
    def test_each_response_by_its_own_weights(self, world, monkeypatch, method, delay, algorithm):
        words = {"adapt.rollout_delay": delay, "adapt.reevaluate_every": 1, "adapt.method": method}
        words |= {"train.num_episodes": 6, "adapt.filter": "none"}
        words |= {"adapt.options": "start_above=0", "adapt.batch_size": 8} if method == "exgrpo" else {}
        words |= {"adapt.returns": "vtrace"} if algorithm == "ba_ppo" else {}
        plain = Engine.generate_responses

        def rounded(engine, **arguments):
            answers = plain(engine, **arguments)
            more = self.rounding(engine.weights)
            for answer in answers:
                answer["rollout_log_probs"] = [0.0, 0.0, *(x + more for x in answer["rollout_log_probs"][2:])]
            return answers

        monkeypatch.setattr(Engine, "generate_responses", rounded)
        run = world(algorithm=algorithm, prompts=8, **words)
        run.reward = self.reward
        maker, seen, corrections = run.trainer.experience_maker, [], []
        finish, set_advantages = maker.finish, experience_module.set_advantages

        def spy(passed, kept):
            experience = finish(passed, kept)
            seen.append((run.trainer.state.step, experience.origins, experience.samples, corrections[-1]))
            return experience

        def correct(*args, log_ratios, **kwargs):
            corrections.append(log_ratios)
            return set_advantages(*args, log_ratios=log_ratios, **kwargs)

        monkeypatch.setattr(maker, "finish", spy)
        monkeypatch.setattr(experience_module, "set_advantages", correct)
        run.trainer.fit()
        mixed: Counter = Counter()
        for step, origins, samples, token_log_ratios in seen:
            weights_of = []
            for place, (origin, one) in enumerate(zip(origins, samples, strict=True)):
                mask, tokens = one.action_mask[0].bool(), one.sequences[0].tolist()
                stored = one.rollout_log_probs[0][mask]
                by_weights = {w: torch.tensor(run.log_probs(tokens, w))[mask] for w in range(step + 1)}
                weights = [w for w, x in by_weights.items() if torch.equal(x + self.rounding(w), stored)]
                assert len(weights) == 1  # which the test finds out only from the numbers
                current = weights == [step]
                assert origin.on_policy == current
                assert torch.equal(one.action_log_probs[0][mask], by_weights[step] if current else stored)
                if algorithm == "ba_ppo":
                    wanted = (by_weights[step].double() - stored.double()) * (not current)
                    assert np.array_equal(token_log_ratios[place][0][mask.numpy()], wanted.numpy())
                weights_of += weights
            for group in range(len(weights_of) // 4):
                of_group = [weights_of[4 * group + n] for n in range(4)]
                assert len(set(of_group[1:])) == 1
                mixed[origins[4 * group].source] += of_group[0] < of_group[1]
        assert mixed["fresh" if method == "arpo" else "reevaluated"] >= 4 and len(+mixed) == 1

    def test_the_record_has_what_was_generated_and_the_log_what_was_trained_on(self, fitted):
        words = {"adapt.method": "arpo", "adapt.rollout_delay": 1, "train.num_episodes": 6}
        run = fitted(prompts=8, reward=self.reward, **words)
        rows, metrics = read_groups(run.record), run.metrics()
        helped = 0
        for row, request in zip(rows, run.requests, strict=True):
            rewards = [run.reward(request.prompt, request.weights, n) for n in range(4)]
            assert row["mean"] == sum(rewards) / 4
            helped += row["state"] == "fresh" and row["mean"] == 0
        assert helped == sum(metric["exchange/groups"] for metric in metrics) >= 4
        for step, metric in enumerate(metrics):
            means = [row["mean"] for row in rows if row["step"] == step + 1]
            assert metric["groups/generated"] == len(means) == sum(metric[f"groups/{state}"] for state in STATES)
            assert metric["reward/fresh_mean"] == pytest.approx(np.mean(means))


class TestOnPolicy:
    """If an update leaves the actor as it is, what was generated before it is of today's weights still."""

    @staticmethod
    def versions(run):
        """Whether each response that the models pass is on-policy, and whether its version is the step."""
        forward, updates, seen = run.trainer.experience_maker.forward, {}, set()

        def spy(origins):
            step = run.trainer.state.step
            updates[step] = run.updates["actor"]
            for origin in origins:
                version = origin.group.weights_version_of(origin.response)
                assert origin.on_policy == (updates[version] == updates[step])
                seen.add((origin.on_policy, version == step))
            return forward(origins)

        run.trainer.experience_maker.forward, actor = spy, run.groups["actor"]
        exact = actor.forward  # to which the engines' kernels add some rounding
        actor.forward = lambda sequences: exact(sequences) + 0.01 * torch.sin(sequences[:, 1:])
        run.trainer.fit()
        return seen

    def test_while_the_actor_is_frozen(self, world):
        words = {"algorithm": "ba_ppo", "adapt.returns": "vtrace", "adapt.value_pretraining": 1}
        run = world(prompts=40, **words, **{"critic.freezing_steps": 4})
        assert self.versions(run) == {(True, True), (True, False), (False, False)}
        rows = run.metrics()
        for row in rows[:6]:  # in step 5 the actor begins to learn
            assert row["gap/age"] == row.get("shift/fresh", 0) == row.get("shift/replayed", 0) == 0
        assert rows[5]["groups/replayed"] and rows[6]["shift/replayed"] > 0
        for _, experiences in run.taught[:10:2]:  # V-trace corrects none of the Monte Carlo returns
            for e in experiences:
                targets = e.rewards.unsqueeze(-1).expand(e.returns.shape)
                assert torch.allclose(e.returns[e.action_mask.bool()], targets[e.action_mask.bool()], atol=1e-5)

    def test_after_a_batch_without_groups(self, world):
        run = world(prompts=40)
        plain = run.reward
        run.reward = lambda *what: plain(*what) * (run.step not in (0, 4, 5, 6, 7))
        assert (True, False) in self.versions(run)
        rows = run.metrics()
        skipped = [step for step, row in enumerate(rows) if "skipped_update" in row]
        assert skipped[0] == 0 and rows[1]["shift/fresh"] == 0 < rows[2]["shift/fresh"]
        assert run.trainer.state.weights_since == max(set(range(1, 21)) - {step + 1 for step in skipped})


class TestReview:
    def test_in_a_run_what_is_dropped_is_counted_and_not_trained_on(self, world):
        limits = {"adapt.max_shift_replayed": 0.0025, "adapt.max_shift_fresh": 0.003}
        run = world(prompts=40, **limits, **{"adapt.batch_size": 6})
        reviews, review = [], run.trainer.accounts.review

        def spy(*passed):
            reviews.append(review(*passed))
            return reviews[-1]

        run.trainer.accounts.review = spy
        run.trainer.fit()
        rows = run.metrics()
        assert sum(row["groups/too_far"] for row in rows) > 2 and sum(row["groups/unused"] for row in rows) > 2
        for step, row in enumerate(rows):
            assert row["groups/generated"] == sum(row[f"groups/{state}"] for state in STATES)
            stays, result = reviews[step].batch, reviews[step].shifts
            assert all(result[group] <= 0.003 for group in stays.fresh)
            assert all(result[group] <= 0.0025 for group in stays.replayed)
            assert all(result[group] > 0.003 for group in stays.too_far)
            assert all(result[group] > 0.0025 for group in stays.unused)
            trained = sum(len(experiences) for at, experiences in run.trained if at == step)
            assert trained == 4 * sum(row[f"groups/{source}"] for source in SOURCES)

    def test_in_a_run_groups_with_broken_log_probs_leave_the_batch(self, fitted):
        run = fitted(prompts=24, spoilt={5, 6}, **{"adapt.max_failed_share": 1})
        rows = run.metrics()
        assert sum(row["groups/nonfinite"] for row in rows) > 3 and sum(row["groups/unused"] for row in rows) > 0
        assert all(row["groups/generated"] == sum(row[f"groups/{state}"] for state in STATES) for row in rows)
        assert len(run.trained) > 3
        for _, experiences in run.trained:
            for experience in experiences:
                tokens = experience.sequences[:, 1:][experience.action_mask.bool()]
                assert len(tokens) and not set(tokens.tolist()) & run.spoilt
                assert experience.advantages.isfinite().all()

    def test_too_many_broken_groups_stop_the_run(self, world):
        run = world(**{"adapt.max_failed_share": 0.0})
        run.spoilt = {5, 6}
        with pytest.raises(RuntimeError, match=r"[1-4] of [1-4] groups .* not finite; adapt.max_failed_share is 0.0"):
            run.trainer.fit()
        assert all(e.advantages.isfinite().all() for _, experiences in run.trained for e in experiences)


def test_clipped_tokens_are_those_of_the_flags(fitted, monkeypatch):
    clips, measure = [], accounts.first_update
    monkeypatch.setattr(accounts, "first_update", lambda tokens, clip: clips.append(clip) or measure(tokens, clip))
    fitted(**{"actor.eps_clip_low_high": [0.1, 0.3], "actor.dual_clip": 3.0, "train.num_episodes": 1})
    assert set(clips) == {accounts.Clip(0.1, 0.3, dual=3.0)}

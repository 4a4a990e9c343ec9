"""Sampling on the CPU: the inverse of the cumulative distribution, against numpy in float64."""

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bapo_openrlhf.cpu import patches_vllm


@given(
    rows=st.integers(1, 40), vocabulary=st.integers(1, 50), banned=st.floats(0, 0.9), seed=st.integers(0, 10**6),
    numbers=st.sampled_from([0.0, 1 - 2**-53, None]),
)  # fmt: skip
@settings(max_examples=100, derandomize=True, database=None)
def test_draws_the_token_at_which_the_cumulative_probability_passes_the_number(rows, vocabulary, banned, seed, numbers):
    random = np.random.default_rng(seed)
    logits = np.where(random.random((rows, vocabulary)) < banned, -np.inf, 3 * random.normal(size=(rows, vocabulary)))
    logits[:, random.integers(vocabulary)] = 0.5  # one token at least
    log_probs = torch.from_numpy(logits).float().log_softmax(-1)
    given = random.random((rows, 1)) if numbers is None else np.full((rows, 1), numbers)
    shares = log_probs.exp().double().numpy()
    shares /= shares.sum(-1, keepdims=True)
    for row, token in enumerate(patches_vllm.draw(log_probs, torch.from_numpy(given)).tolist()):
        assert shares[row, token] > 0
        assert shares[row, :token].sum() <= given[row, 0] + 1e-12
        assert shares[row, : token + 1].sum() > given[row, 0] - 1e-12


def test_sampling_uses_the_generator_of_a_request_and_returns_log_probs_after_top_k():
    torch.manual_seed(0)
    logits, sampler = torch.randn(64, 12), SimpleNamespace(logprobs_mode="processed_logprobs")

    def draw(seeded):
        generators = {row: torch.Generator().manual_seed(row) for row in seeded}
        return patches_vllm.sample(None, sampler, logits.clone(), generators, torch.full((64,), 3), None)

    (first, log_probs), (second, _) = draw(range(32)), draw(range(32))
    assert torch.equal(first[:32], second[:32]) and not torch.equal(first[32:], second[32:])
    assert (log_probs.isfinite().sum(-1) == 3).all()
    kept = logits.masked_fill(log_probs == -torch.inf, -torch.inf)
    np.testing.assert_allclose(log_probs, kept.log_softmax(-1), rtol=1e-6)
    assert log_probs.gather(-1, first[:, None]).isfinite().all()


def test_rows_that_are_not_numbers_draw_a_token_that_exists():
    """The engine goes on after an update to weights that are not finite; the run then says so (test_faults.py)."""
    log_probs = torch.log(torch.tensor([[0.25, 0.75], [torch.nan, torch.nan], [0.25, torch.nan]]))
    result = patches_vllm.draw(log_probs, torch.tensor([[0.5], [0.5], [0.5]], dtype=torch.float64)).tolist()
    assert result[0] == 1 and {*result} <= {0, 1}

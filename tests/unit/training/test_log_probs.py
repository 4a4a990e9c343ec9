"""Log-probs and entropies of response tokens: against float64, and against OpenRLHF's actor on the same model."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from openrlhf.models import Actor, actor
from openrlhf.models.utils import log_probs_from_logits
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig
from transformers.utils import ModelOutput

from bapo_openrlhf.training.worker import log_probs
from bapo_openrlhf.training.worker.log_probs import SlicedActor, TokenHead, token_log_probs

LLAMA = LlamaConfig(
    vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    tie_word_embeddings=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """Tests may change the sizes of blocks and tiles."""
    monkeypatch.setattr(log_probs, "BLOCK", log_probs.BLOCK)
    monkeypatch.setattr(log_probs, "TILE", log_probs.TILE)


def in_float64(hidden, weight, bias, labels, temperature):
    """Log-probs and entropies, and inputs that can have gradients."""
    inputs = [None if part is None else part.detach().double().requires_grad_() for part in (hidden, weight, bias)]
    logits = torch.nn.functional.linear(*inputs) / temperature
    log_p = torch.log_softmax(logits, -1)
    chosen = log_p[torch.arange(len(labels)), labels]
    return torch.stack([chosen, -(log_p.exp() * log_p).sum(-1)], -1), inputs


@given(
    tokens=st.integers(0, 7), vocabulary=st.integers(1, 9), block=st.integers(1, 70), tile=st.integers(1, 20),
    temperature=st.sampled_from([1.0, 0.6]), biased=st.booleans(), entropy=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@settings(derandomize=True, database=None)
def test_equals_float64_in_blocks_and_tiles_of_any_size(
    tokens, vocabulary, block, tile, temperature, biased, entropy, seed
):
    log_probs.BLOCK, log_probs.TILE = block, {"cpu": tile}
    torch.manual_seed(seed)
    hidden, weight = 3 * torch.randn(tokens, 4), torch.randn(vocabulary, 4)
    bias, labels = torch.randn(vocabulary) if biased else None, torch.randint(0, vocabulary, (tokens,))
    ours = [None if part is None else part.clone().requires_grad_() for part in (hidden, weight, bias)]
    actual = token_log_probs(*ours, labels, temperature=temperature, entropy=entropy)
    expected, theirs = in_float64(hidden, weight, bias, labels, temperature)
    expected = expected[:, : 2 if entropy else 1]
    np.testing.assert_allclose(actual.detach(), expected.detach(), rtol=1e-4, atol=1e-4)  # logits up to 40
    towards = torch.randn(expected.shape)
    actual.backward(towards)
    expected.backward(towards.double())
    for our, their in zip(ours, theirs, strict=True):
        if our is not None:
            np.testing.assert_allclose(our.grad, their.grad, rtol=1e-3, atol=1e-4)


def test_in_bfloat16_log_probs_are_the_bits_that_openrlhf_computes():
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 32, dtype=torch.bfloat16), torch.randn(300, 32, dtype=torch.bfloat16)
    labels = torch.randint(0, 300, (40,))
    log_probs.TILE = {"cpu": 1000}  # three rows
    expected = log_probs_from_logits((hidden @ weight.T).float().unsqueeze(0), labels.unsqueeze(0))[0]
    assert torch.equal(token_log_probs(hidden, weight, None, labels)[:, 0], expected)


def test_a_frozen_head_gets_no_gradient():
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    token_log_probs(hidden, weight, None, torch.tensor([0, 4, 2]))[:, 0].sum().backward()
    assert weight.grad is None and hidden.grad.abs().sum() > 0


def actor_of(kind, model, is_vlm=False):
    made = kind(model)
    made.is_vlm, made.packing_samples, made.temperature = is_vlm, False, 0.7
    return made


def built(kind, config, tied=True):
    torch.manual_seed(1)
    config.tie_word_embeddings = tied
    return actor_of(kind, AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


def ragged_batch():
    """Three samples of other lengths. One has two turns, and one has no response at all."""
    torch.manual_seed(2)
    sequences = torch.randint(0, 50, (3, 9))
    attention = torch.ones(3, 9, dtype=torch.long)
    attention[1, 6:] = attention[2, 7:] = 0
    actions = torch.zeros(3, 8, dtype=torch.long)
    actions[0, 2:4] = actions[0, 6:] = actions[1, 3:5] = 1
    return sequences, actions, attention


def run(model, sequences, actions, attention, **more):
    """Log-probs, entropies under the mask, and the gradients of a loss on both."""
    model.zero_grad()
    result, output = model(sequences, actions, attention, return_output=True, return_entropy=True, **more)
    entropies = output.entropy[:, -actions.shape[1] :] * actions
    (result * torch.arange(1.0, 1 + actions.shape[1])).sum().sub(entropies.sum()).backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.model.named_parameters()}
    return result.detach(), entropies.detach(), gradients


def same(ours, theirs):
    for our, their in zip(ours[:2], theirs[:2], strict=True):
        np.testing.assert_allclose(our, their, rtol=1e-5, atol=1e-5)
    for name, gradient in theirs[2].items():
        np.testing.assert_allclose(ours[2][name], gradient, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("width", [8, 7, 5])  # of the action mask: OpenRLHF may cut it on the left
def test_an_actor_has_openrlhfs_numbers_and_gradients(width):
    sequences, actions, attention = ragged_batch()
    batch = sequences, actions[:, -width:], attention
    ours = built(SlicedActor, LLAMA)
    same(run(ours, *batch), run(built(Actor, LLAMA), *batch))
    assert ours.model.lm_head.request is None
    plain = ours(*batch)
    assert plain.shape == (3, width) and not plain[~batch[1].bool()].any()
    assert ours(sequences, attention_mask=attention, return_output=True)["logits"].shape == (3, 9, 50)


def test_only_response_tokens_reach_the_head(monkeypatch):
    seen, plain = [], log_probs.token_log_probs

    def note(hidden, *rest, **more):
        seen.append(len(hidden))
        return plain(hidden, *rest, **more)

    monkeypatch.setattr(log_probs, "token_log_probs", note)
    batch = ragged_batch()
    built(SlicedActor, LLAMA)(*batch)
    assert seen == [int(batch[1].sum())]


def test_packed_samples(monkeypatch):
    """Samples in one row without padding. flash-attn's functions are replaced, because they need a GPU."""

    def unpad(sequences, attention, _group):
        places = attention.flatten().nonzero().squeeze(-1)
        rolled = torch.roll(sequences, -1, 1)
        positions = (attention.cumsum(-1) - 1).flatten()[places]
        return sequences.flatten()[places][None], positions[None], rolled.flatten()[places][None], 0, places

    def pad(tensor, _group, _padding, places, batch, length):
        return tensor.new_zeros(batch * length).index_copy(0, places, tensor[0]).view(batch, length)

    for module in (actor, log_probs):
        monkeypatch.setattr(module, "unpad_and_slice_tensor", unpad)
        monkeypatch.setattr(module, "gather_and_pad_tensor", pad)
    ours, theirs = built(SlicedActor, LLAMA), built(Actor, LLAMA)
    ours.packing_samples = theirs.packing_samples = True
    same(run(ours, *ragged_batch()), run(theirs, *ragged_batch()))


def test_a_model_that_changes_its_logits_after_the_head_is_run_as_openrlhf_runs_it():
    capped = Gemma2Config(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.5, tie_word_embeddings=True,
    )  # fmt: skip
    ours = built(SlicedActor, capped)
    same(run(ours, *ragged_batch()), run(built(Actor, capped), *ragged_batch()))
    assert not ours.sliced


def test_a_hook_may_make_another_object_of_the_logits():
    """As DeepSpeed's does under ZeRO-3. The logits of other tokens are still not computed."""
    ours = built(SlicedActor, LLAMA)

    def hook(_module, _inputs, output):
        output["logits"] = output["logits"].view_as(output["logits"])

    ours.model.register_forward_hook(hook)
    same(run(ours, *ragged_batch()), run(built(Actor, LLAMA), *ragged_batch()))
    assert ours.sliced


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_the_models_own_parameter(tied, tmp_path):
    """Names, tied embeddings and saved files are those of the model as it was loaded."""
    models = [built(kind, copy.deepcopy(LLAMA), tied=tied) for kind in (SlicedActor, Actor)]
    ours, theirs = (model.model for model in models)
    assert type(ours.lm_head) is TokenHead and type(theirs.lm_head) is torch.nn.Linear
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    assert (ours.lm_head.weight is ours.get_input_embeddings().weight) is tied
    for model, folder in ((ours, "ours"), (theirs, "theirs")):
        model.save_pretrained(tmp_path / folder)
    files = [load_file(tmp_path / folder / "model.safetensors") for folder in ("ours", "theirs")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "lm_head"]])
def test_adapters(targets):
    """With adapters on the head it is not one matrix, so the model is run as OpenRLHF runs it."""

    def adapted(kind):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(LLAMA, attn_implementation="eager")
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.25)
        adapters = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        return actor_of(kind, get_peft_model(model, adapters))

    ours, theirs = (adapted(kind)(*ragged_batch()) for kind in (SlicedActor, Actor))
    np.testing.assert_allclose(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-5)


class Seeing(torch.nn.Module):
    """A vision-language model, as far as `Actor.forward` looks at it: it notes what it gets."""

    def __init__(self):
        super().__init__()
        self.embed, self.lm_head, self.got = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50, bias=False), []

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, head):
        self.lm_head = head

    def forward(self, tokens, **inputs):
        self.got.append(inputs)
        return ModelOutput(logits=self.lm_head(self.embed(tokens)))


@pytest.mark.parametrize(
    ("images", "video"),
    [({}, None), ({"pixel_values": 1, "image_grid_thw": 2}, 9), ({"pixel_values": 1}, None), ({"pixel_values": 1}, 9)],
)
def test_a_model_with_images_gets_what_openrlhf_gives_it(images, video):
    sequences, actions, attention = ragged_batch()
    sequences[0, :2], sequences[1, 0] = 7, 9  # of an image, and of a video
    result = []
    for kind in (SlicedActor, Actor):
        torch.manual_seed(1)
        model = actor_of(kind, Seeing(), is_vlm=True)
        model._vlm_config = SimpleNamespace(image_token_id=7, **({} if video is None else {"video_token_id": video}))
        log_probs_ = model(sequences, actions, attention, packed_seq_lens=None, **images)
        result.append((log_probs_, model.model.got))
    (ours, our_inputs), (theirs, their_inputs) = result
    np.testing.assert_allclose(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-5)
    assert repr(our_inputs) == repr(their_inputs) and len(our_inputs) == 1

"""What the unit tests share: a builder of groups, a tokenizer, pages without charts, no waiting, unblocked signals."""

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from bapo_openrlhf.adapt.group import Group, Prompt, Response


@pytest.fixture(autouse=True)
def signals_reach_this_thread() -> Iterator[None]:
    """A test that blocks a signal in this process, and leaves that so, fails. Later tests would not get the signal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    after = signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert after == before, f"the test leaves {after - before} blocked"


@pytest.fixture(scope="session")
def make_group() -> Callable[..., Group]:
    """Builds a group: `make_group(3, step=2)` has 3 of 8 responses right, `make_group([0.5, 1.0])` these rewards.

    Session-wide so that property tests may use it; it keeps nothing but the next uid.
    """
    uids = itertools.count()

    def build(
        right: int | Sequence[float],
        *,
        size: int = 8,
        prompt: str | Prompt | None = None,
        step: int = 0,
        weights_version: int | None = None,
        uid: int | None = None,
        prompt_tokens: int = 3,
        response_tokens: int = 2,
    ) -> Group:
        uid = next(uids) if uid is None else uid
        rewards = [1.0] * right + [0.0] * (size - right) if isinstance(right, int) else list(right)
        if not isinstance(prompt, Prompt):
            prompt = Prompt(f"prompt {uid}" if prompt is None else prompt)
        responses = tuple(
            Response(
                token_ids=np.arange(prompt_tokens + response_tokens) + 100 * index,
                action_spans=((prompt_tokens, prompt_tokens + response_tokens),),
                log_probs=np.full(response_tokens, -0.5 - index),
                reward=reward,
            )
            for index, reward in enumerate(rewards)
        )
        return Group(uid, prompt, responses, step, step if weights_version is None else weights_version)

    return build


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Charts of pages are made, but neither compared with Vega-Lite's schema nor drawn, which takes most of the time.

    The pages that are drawn have charts of every kind. `make test-all` compares all charts with the schema.
    """
    from altair.utils import schemapi

    from bapo_openrlhf.workbench.pages import figure

    thorough = settings.get_current_profile_name() == "thorough"
    if not thorough:
        monkeypatch.setattr(figure, "specification", lambda chart: {"mark": type(chart).__name__})
    monkeypatch.setattr(figure.vl_convert, "vegalite_to_svg", lambda spec: json.dumps(spec) and "<svg><g></g></svg>")
    with schemapi.debug_mode(thorough):
        yield


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<ai>{% endif %}"
)


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """A folder with a tokenizer of one token a byte, and a chat template: <user>TEXT<ai>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(tmp_path / "tokenizer")
    LlamaConfig(max_position_embeddings=77).save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.fixture
def without_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of a test need no tokenizer and no real weights, because to load them takes most of its time."""
    monkeypatch.setattr("bapo_openrlhf.launch.preflight.check_tokenizer", lambda flag, model: None)
    monkeypatch.setattr("bapo_openrlhf.launch.apart.Questions.ask", lambda self, *question: None)


@pytest.fixture(scope="module")
def no_waiting_for_the_disk() -> Iterator[None]:
    """No test of the module cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def keep_environment() -> Iterator[None]:
    """Loading a tokenizer sets the environment variables of a run on the CPU."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)

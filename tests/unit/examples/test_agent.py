"""The example of an agent, in OpenRLHF's own executor."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm import SamplingParams

from bapo_openrlhf import user_file

EXAMPLES = Path(__file__).parents[3] / "examples"
TOKENIZER = user_file.load("base model", EXAMPLES / "quickstart" / "base_model.py").make_tokenizer()


class Engine:
    def __init__(self, *answers):
        self.answers = list(answers)

    async def generate(self, tokens, params, **_):
        text = self.answers.pop(0) + "<eos>"
        ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
        log_probs = [{token: SimpleNamespace(logprob=-0.5)} for token in ids]
        output = SimpleNamespace(token_ids=ids, text=text, finish_reason="stop", logprobs=log_probs)
        return SimpleNamespace(outputs=[output])


@pytest.mark.parametrize(("answers", "reward", "text"), [
    (("3*5+7",), 1.0, "3 5 7:22=3*5+7<eos>"),
    (("3+5+7", "7+3*5"), 0.5, "3 5 7:22=3+5+7<eos> 3 5 7:22=7+3*5<eos>"),
    (("3+5", ""), 0.0, "3 5 7:22=3+5<eos> 3 5 7:22=<eos>"),
])  # fmt: skip
def test_second_try(answers, reward, text):
    executor = user_file.load("agent", EXAMPLES / "agent" / "second_try.py").AgentExecutor()
    request = {"prompt": "3 5 7:22=", "label": "3 5 7:22", "sampling_params": SamplingParams(logprobs=1)}
    engine = Engine(*answers)
    result = asyncio.run(executor.execute(**request, max_length=64, hf_tokenizer=TOKENIZER, llm_engine=engine))
    assert (result["reward"], TOKENIZER.decode(result["observation_tokens"])) == (reward, text)
    said = [TOKENIZER.decode(result["observation_tokens"][start:end]) for start, end in result["action_ranges"]]
    assert said == [f"{one}<eos>" for one in answers] and not engine.answers
    assert result["extra_logs"]["tries"] == len(answers)

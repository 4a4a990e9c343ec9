"""The prompts of an evaluation, made as in training, and their responses from vLLM."""

import gc
import hashlib
import math
import os
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bapo_openrlhf import machine
from bapo_openrlhf.data.prompts import check_tokenizer, fill
from bapo_openrlhf.errors import ConfigError, RunError, one_line
from bapo_openrlhf.launch.model_files import positions_of
from bapo_openrlhf.training.engine.engine_core import ENGINE
from bapo_openrlhf.training.engine.pictures import pictures
from bapo_openrlhf.training.engine.response_text import texts
from bapo_openrlhf.workbench.evaluation.problems import BenchmarkProblem, Request, Sampling

Key = tuple[str, str]  # benchmark and problem id


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt in the form that vLLM gets."""

    text: str  # with chat markup
    token_ids: list[int]  # of the text, with one placeholder for each image
    images: tuple[str, ...]  # paths or addresses
    length: int  # tokens that the model sees, including those of the images


class Prompter:
    """Makes prompts with a model's own tokenizer, or with its processor if there are images.

    `chat` says whether the chat template is applied, and `note` that one was wanted and is not there. `longest` are the
    most tokens of prompt and response together, or None if the model does not say.
    """

    def __init__(self, model: str, *, chat: bool | str, images: bool) -> None:
        """Load the tokenizer; a ConfigError if none can make these prompts. `chat` may be a template with {}."""
        check_tokenizer("model", model)
        from transformers import AutoConfig, AutoProcessor, AutoTokenizer

        try:
            config = AutoConfig.from_pretrained(model, trust_remote_code=True)  # as OpenRLHF
            kind = AutoProcessor if images else AutoTokenizer
            self._processor: Any = kind.from_pretrained(model, trust_remote_code=True)
        except Exception as error:  # transformers raises many kinds of errors for a bad folder.
            start = f"model is {model}; its tokenizer cannot be loaded{machine.offline()}"
            raise ConfigError(f"{start}: {one_line(error)}") from error
        if images and not hasattr(self._processor, "image_processor"):
            raise ConfigError(f"model is {model}; it takes no images, and the problems have some")
        self._tokenizer = getattr(self._processor, "tokenizer", self._processor)
        longest = positions_of(config.get_text_config().to_dict())
        self.longest = None if math.isinf(longest) else int(longest)
        self._template = chat if isinstance(chat, str) else None
        self.chat = chat is True and bool(self._processor.chat_template)
        if images and not self.chat:
            raise ConfigError(f"model is {model}; a prompt with images needs a chat template, and none is used")
        has_none = chat is True and not self.chat
        self.note = "the tokenizer has no chat template: prompts are the text as it is" if has_none else None

    def __call__(self, problem: BenchmarkProblem) -> EncodedPrompt:
        """The prompt of one problem, made by OpenRLHF's function, which also makes those of training."""
        if not self.chat and not isinstance(problem.input, str):
            raise ConfigError(f"problem {problem.id}: the prompt is a list of messages, which needs a chat template")
        text = fill(problem.input, self._template, self._processor.apply_chat_template if self.chat else None)
        # The template has already added special tokens.
        token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        length = len(token_ids)
        if problem.images:
            try:
                images = pictures(list(problem.images))
                inputs = self._processor(text=[text], images=images, add_special_tokens=False)
            except Exception as error:  # a processor raises what it likes
                raise ConfigError(f"problem {problem.id}: {one_line(error)}") from None
            length = len(inputs["input_ids"][0])
        return EncodedPrompt(text, token_ids, problem.images, length)


@dataclass(frozen=True)
class SampledResponse:
    """One response. Both texts have their special tokens."""

    query: str  # prompt and response in one text, as a reward function gets it
    text: str  # only the response
    tokens: int  # of the response
    truncated: bool


def problem_seed(seed: int, benchmark: str, problem: str) -> int:
    """Seed of a problem's responses, to which vLLM adds their numbers. A resumed evaluation draws the same ones."""
    digest = hashlib.blake2b(f"{seed}/{benchmark}/{problem}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2  # vLLM takes 63 bits.


def generate(
    request: Request, prompts: Mapping[Key, EncodedPrompt], max_model_len: int
) -> Iterator[tuple[Key, list[SampledResponse]]]:
    """Ask each prompt `sampling.runs` times; yield its key and responses when it has all. RunError if vLLM fails."""
    machine.set_up()
    os.environ[ENGINE] = str(os.getpid())  # Then vLLM's engine process ends whenever this process ends.
    llm = None
    try:
        llm = _load(request, prompts, max_model_len)
        tokenizer = llm.get_tokenizer()
        # vLLM works on all prompts in order, so a crash loses only the few that it works on.
        for key, output in _outputs(llm.llm_engine, prompts, request.sampling):
            responses = []
            for part in output.outputs:
                # The prompt's tokens are those that the model saw, with all tokens of an image, as in training.
                query, text = texts(tokenizer, output.prompt_token_ids, part.token_ids)
                truncated = part.finish_reason == "length"
                responses.append(SampledResponse(query, text, len(part.token_ids), truncated))
            yield key, responses
    except Exception as error:
        traceback.print_exc()
        raise RunError(f"vLLM failed with {request.model}: {one_line(error)}") from error
    finally:
        # vLLM excludes everything that it has loaded from garbage collection. Without these lines the model's memory
        # is not freed, and its libraries report leaks when the process ends.
        del llm
        gc.unfreeze()
        gc.collect()


def _load(request: Request, prompts: Mapping[Key, EncodedPrompt], max_model_len: int) -> Any:
    import vllm

    options: dict[str, Any] = {
        "model": request.model,
        "dtype": "bfloat16",  # As OpenRLHF's rollout engines.
        "seed": request.sampling.seed,
        "max_model_len": max_model_len,
        "tensor_parallel_size": request.tensor_parallel_size,
        "gpu_memory_utilization": request.gpu_memory_utilization,
        "enforce_eager": machine.on_cpu(),
        "disable_log_stats": True,
        "trust_remote_code": True,  # as OpenRLHF
    }
    if request.max_num_seqs is not None:
        options["max_num_seqs"] = request.max_num_seqs
    if images := max(len(prompt.images) for prompt in prompts.values()):
        options["limit_mm_per_prompt"] = {"image": images}
    return vllm.LLM(**options)


def _outputs(engine: Any, prompts: Mapping[Key, EncodedPrompt], sampling: Sampling) -> Iterator[tuple[Key, Any]]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    keys = {}
    for number, (key, prompt) in enumerate(prompts.items()):
        keys[str(number)] = key
        request: dict[str, Any] = {"prompt_token_ids": prompt.token_ids}
        if prompt.images:
            request["multi_modal_data"] = {"image": pictures(list(prompt.images))}
        params = SamplingParams(
            n=sampling.runs,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_new_tokens,
            min_tokens=1,  # This and the next value are as in OpenRLHF's rollouts.
            skip_special_tokens=False,
            seed=problem_seed(sampling.seed, *key),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine.add_request(str(number), request, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                yield keys[output.request_id], output

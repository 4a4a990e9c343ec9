"""Responses from vLLM, given prompt by prompt as soon as a prompt has all of them."""

import gc
import hashlib
import os
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bapo_openrlhf import machine
from bapo_openrlhf.errors import RunError, one_line
from bapo_openrlhf.training.engine.engine_core import ENGINE
from bapo_openrlhf.training.engine.pictures import pictures
from bapo_openrlhf.training.engine.response_text import texts
from bapo_openrlhf.workbench.evaluation.prompts import EncodedPrompt
from bapo_openrlhf.workbench.evaluation.request import Request, Sampling


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
    request: Request, prompts: Mapping[tuple[str, str], EncodedPrompt], max_model_len: int
) -> Iterator[tuple[tuple[str, str], list[SampledResponse]]]:
    """Ask each prompt `sampling.runs` times; yield its key and responses when it has all. RunError if vLLM fails."""
    machine.set_up()
    os.environ[ENGINE] = str(os.getpid())  # Then vLLM's engine process ends whenever this process ends.
    llm = None
    try:
        llm = _load(request, prompts, max_model_len)
        tokenizer = llm.get_tokenizer()
        # vLLM works on all prompts in order, so a crash loses only the few that it works on.
        for key, output in _outputs(llm.llm_engine, prompts, request.sampling):
            yield key, [_response(tokenizer, output.prompt_token_ids, part) for part in output.outputs]
    except Exception as error:
        traceback.print_exc()
        raise RunError(f"vLLM failed with {request.model}: {one_line(error)}") from error
    finally:
        # vLLM excludes everything that it has loaded from garbage collection. Without these lines the model's memory
        # is not freed, and its libraries report leaks when the process ends.
        del llm
        gc.unfreeze()
        gc.collect()


def _load(request: Request, prompts: Mapping[tuple[str, str], EncodedPrompt], max_model_len: int) -> Any:
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


def _outputs(
    engine: Any, prompts: Mapping[tuple[str, str], EncodedPrompt], sampling: Sampling
) -> Iterator[tuple[tuple[str, str], Any]]:
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


def _response(tokenizer: Any, prompt_token_ids: list[int], part: Any) -> SampledResponse:
    # The tokens are those that the model saw, with all tokens of an image, as in training.
    query, text = texts(tokenizer, prompt_token_ids, part.token_ids)
    return SampledResponse(query, text, len(part.token_ids), part.finish_reason == "length")

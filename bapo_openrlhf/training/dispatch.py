"""How the prompts of a rollout reach the engines: in few calls, because each call costs both processes time."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

from bapo_openrlhf.training.contract import extends

CALLS = 8  # of each engine and rollout at most, so that the progress bar moves and samples are made meanwhile
OWN = ("prompt", "label", "images")  # what a request does not share with the others of its rollout


class ChangedHandle:
    """The handle of an engine. Some of its methods are replaced by functions of this process.

    Args:
        engine: Handle of the engine.
        methods: A function for each replaced method.
    """

    def __init__(self, engine: Any, **methods: Callable[..., Any]) -> None:
        self._engine = engine
        for name, method in methods.items():
            setattr(self, name, SimpleNamespace(remote=method))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class DispatchingGenerator(SamplesGenerator):
    """OpenRLHF's generator, which sends prompts together and without the tokenizer, which the engines already have.

    OpenRLHF decides which engine gets a prompt, and still gets a reference for each prompt. With dynamic filtering each
    prompt is a call of its own, because OpenRLHF replaces a filtered prompt as soon as its responses are there. So it
    is for an agent, whose responses may take very different times.
    """

    def _next_number(self) -> dict[str, int | None]:
        """What the next request has in addition: its number and its seed."""
        return {}

    @extends(SamplesGenerator)
    def _generate_vllm(self, dataloader_iter: Any, num_prompts: int, **kwargs: Any) -> Any:
        """Generate as OpenRLHF does, but ask for all prompts of an evaluation at once.

        OpenRLHF asks for as many as a training step has, and waits for them.
        """
        evaluated = getattr(self, "_eval_dataloader_iter", None)
        if evaluated is not None and dataloader_iter is evaluated:
            num_prompts = len(self.eval_dataloader)  # OpenRLHF makes it with one prompt in each batch
        return super()._generate_vllm(dataloader_iter=dataloader_iter, num_prompts=num_prompts, **kwargs)

    @extends(SamplesGenerator)
    def _dispatch_prompts_to_vllm(self, prompts: list[str], labels: list, **kwargs: Any) -> list:
        """Send prompts to the engines. Returns Ray's reference to the responses of each."""
        engines, places = self.vllm_engines, itertools.count()
        boxes: list[list[tuple[int, dict[str, Any]]]] = [[] for _ in engines]

        def collect(box: list[tuple[int, dict[str, Any]]], *, hf_tokenizer: Any, **request: Any) -> int:
            box.append((next(places), request | self._next_number()))
            return box[-1][0]

        self.vllm_engines = [
            ChangedHandle(engine, generate_responses=partial(collect, box))
            for engine, box in zip(engines, boxes, strict=True)
        ]
        try:
            asked = super()._dispatch_prompts_to_vllm(prompts, labels, **kwargs)
        finally:
            self.vllm_engines = engines
        refs: dict[int, Any] = {}
        for engine, box in zip(engines, boxes, strict=True):
            refs |= self._send(engine, box)
        return [refs[place] for place in asked]

    def _send(self, engine: Any, box: Sequence[tuple[int, dict[str, Any]]]) -> dict[int, Any]:
        """Send requests to an engine. Returns Ray's reference for each place."""
        if self.args.train.agent_func_path:
            return {place: engine.generate_responses.remote(**request) for place, request in box}
        size = 1 if self.args.algo.dynamic_filtering_enable else -(-len(box) // CALLS) or 1
        refs: dict[int, Any] = {}
        for start in range(0, len(box), size):
            places, requests = zip(*box[start : start + size], strict=True)
            shared = {name: value for name, value in requests[0].items() if name not in (*OWN, "seed", "number")}
            own = [{name: value for name, value in request.items() if name not in shared} for request in requests]
            found = engine.generate_groups.options(num_returns=len(own)).remote(own, **shared)
            refs |= zip(places, found if len(own) > 1 else [found], strict=True)
        return refs

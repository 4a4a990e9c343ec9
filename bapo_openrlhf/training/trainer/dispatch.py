"""How the prompts of a rollout reach the engines.

With `requests` among `run.faster` they do so in few calls, because each call costs both processes time. Otherwise each
prompt is a call, as in OpenRLHF.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import ray
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from vllm import SamplingParams

from bapo_openrlhf.host import extends
from bapo_openrlhf.training.wire.failures import Failures

CALLS = 8  # of each engine and rollout at most, so that the progress bar moves and samples are made meanwhile
VARYING = ("prompt", "label", "images", "prefix")  # what a request does not share with the others of its rollout


class DispatchingGenerator(SamplesGenerator):
    """OpenRLHF's generator, which sends prompts together and without the tokenizer, which the engines already have.

    OpenRLHF still gets a reference for each prompt. With OpenRLHF's own dynamic filtering each prompt is a call of its
    own, because a filtered prompt is replaced as soon as its responses are there. So it is for an agent, whose
    responses may take very different times.

    Attributes:
        before_samples: Called before OpenRLHF's loop gets the samples of a step.
    """

    before_samples: Callable[[], None] = staticmethod(lambda: None)

    @classmethod
    def of(cls, trainer: Any, **options: Any) -> Self:
        """A generator for the prompts, evaluations and engines of OpenRLHF's trainer.

        Args:
            trainer: The trainer, once OpenRLHF's constructor has run.
            options: What a subclass takes in addition.
        """
        shared = ("strategy", "prompts_dataloader", "eval_dataloader", "tokenizer", "vllm_engines")
        return cls(**{name: getattr(trainer, name) for name in shared}, **options)

    def set_up_engines(self) -> None:
        """Give each engine the tokenizer and the limits of the reward function, before anything is generated."""
        settings = (self.tokenizer, self.args.verifier, self.args.adapt.enabled)
        ray.get([engine.set_up.remote(*settings) for engine in self.vllm_engines])

    def failed_calls(self) -> str:
        """What the engines say of failed calls of the reward function or the agent, to go on a sentence."""
        failures = Failures.of(ray.get([engine.reward_failures.remote() for engine in self.vllm_engines]))
        return f". {failures}" if failures.kinds else ""

    @property
    def log_probs(self) -> bool:
        """Whether the engines give the log-probs of what they sample."""
        return self.args.algo.advantage.is_correction_level != "off"

    @property
    def faster(self) -> bool:
        """Whether prompts go to the engines in few calls."""
        return self.args.run.does_faster("requests")

    @extends(SamplesGenerator)
    def _generate_vllm(self, dataloader_iter: Any, num_prompts: int, **kwargs: Any) -> Any:
        """Generate as OpenRLHF does, but ask for all prompts of an evaluation at once.

        OpenRLHF asks for as many as a training step has, and waits for them.
        """
        evaluated = getattr(self, "_eval_dataloader_iter", None)
        if self.faster and evaluated is not None and dataloader_iter is evaluated:
            num_prompts = len(self.eval_dataloader)  # OpenRLHF makes it with one prompt in each batch
        return super()._generate_vllm(dataloader_iter=dataloader_iter, num_prompts=num_prompts, **kwargs)

    @extends(SamplesGenerator)
    def _dispatch_prompts_to_vllm(
        self,
        prompts: list[str],
        labels: list,
        *,
        images: list | None = None,
        requests: Iterator[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list:
        """Send each prompt to the engine that has least to do. Returns Ray's reference to the responses of each.

        Args:
            prompts, labels, images: One of each for each request.
            requests: What one request after the other has in addition (`Ask.requests`), if they have something.
            kwargs: OpenRLHF's arguments of the generation.
        """
        size = kwargs.get("n_samples_per_prompt", self.args.rollout.n_samples_per_prompt)
        shared = {
            "sampling_params": SamplingParams(
                temperature=kwargs.get("temperature", 1.0),
                top_p=kwargs.get("top_p", 1.0),
                top_k=kwargs.get("top_k", -1),
                max_tokens=kwargs.get("max_new_tokens"),  # None: as many as fit into max_length
                min_tokens=kwargs.get("min_new_tokens", 1),
                skip_special_tokens=kwargs.get("skip_special_tokens", False),
                logprobs=1 if self.log_probs else None,
            ),
            "max_length": kwargs.get("max_len", 2048),
            "num_samples": size,
        }
        loads = ray.get([engine.get_num_unfinished_requests.remote() for engine in self.vllm_engines])
        boxes: list[list[tuple[int, dict[str, Any]]]] = [[] for _ in self.vllm_engines]
        own = requests or itertools.repeat({})
        rows = zip(prompts, labels, images or [None] * len(prompts), strict=True)
        for place, (prompt, label, image) in enumerate(rows):
            least = loads.index(min(loads))
            loads[least] += size
            request = shared | {"prompt": prompt, "label": label, "images": image, **next(own)}
            boxes[least].append((place, request))
        refs: dict[int, Any] = {}
        for engine, box in zip(self.vllm_engines, boxes, strict=True):
            refs |= self._send(engine, box)
        return [refs[place] for place in range(len(prompts))]

    def _send(self, engine: Any, box: Sequence[tuple[int, dict[str, Any]]]) -> dict[int, Any]:
        """Send requests to an engine. Returns Ray's reference for each place."""
        if self.args.train.agent_func_path or not self.faster:
            return {place: engine.generate_responses.remote(**request) for place, request in box}
        one_by_one = self.args.algo.dynamic_filtering_enable and not self.args.adapt.enabled
        size = 1 if one_by_one else -(-len(box) // CALLS) or 1
        refs: dict[int, Any] = {}
        for start in range(0, len(box), size):
            places, requests = zip(*box[start : start + size], strict=True)
            shared = {name: value for name, value in requests[0].items() if name not in (*VARYING, "seed", "number")}
            differing = [{name: value for name, value in request.items() if name not in shared} for request in requests]
            results = engine.generate_groups.options(num_returns=len(differing)).remote(differing, **shared)
            refs |= zip(places, results if len(differing) > 1 else [results], strict=True)
        return refs

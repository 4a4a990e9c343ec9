"""OpenRLHF's generator, for runs without batch adaptation. It sends prompts in few calls, and reports what it drops."""

from collections.abc import Callable
from typing import Any

from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

from bapo_openrlhf.host import extends
from bapo_openrlhf.training.trainer.engine_calls import EngineCalls


class RecordedSamplesGenerator(SamplesGenerator):
    """OpenRLHF's generator, which adds the samples that its dynamic filtering drops to `filtered`, in whole groups."""

    def __init__(
        self, *, calls: EngineCalls, filtered: list[Experience], before_samples: Callable[[], None], **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._calls, self._filtered, self._before_samples, self.exhausted = calls, filtered, before_samples, False
        self._converted: list[Experience] = []

    @extends(SamplesGenerator)
    def generate_samples(self, **kwargs: Any) -> Any:
        """Generate the samples of a step, as OpenRLHF does."""
        self._before_samples()
        samples = super().generate_samples(**kwargs)
        self.exhausted = samples[-1]
        return samples

    @extends(SamplesGenerator)
    def _process_response_into_experience(self, response: dict[str, Any], **kwargs: Any) -> Experience:
        """Make a sample of a response, and remember it."""
        sample = super()._process_response_into_experience(response, **kwargs)
        self._converted.append(sample)
        return sample

    @extends(SamplesGenerator)
    def _generate_vllm(self, dataloader_iter: Any, num_prompts: int, **kwargs: Any) -> Any:
        """Generate, and report the samples that OpenRLHF did not accept."""
        # OpenRLHF asks for as many prompts of an evaluation as a training step has, and waits for them before the next.
        evaluated = getattr(self, "_eval_dataloader_iter", None)
        if self._calls.few and evaluated is not None and dataloader_iter is evaluated:
            num_prompts = len(self.eval_dataloader)  # OpenRLHF makes it with one prompt in each batch
        self._converted = []
        accepted, *rest = super()._generate_vllm(dataloader_iter=dataloader_iter, num_prompts=num_prompts, **kwargs)
        kept = set(map(id, accepted))
        self._filtered += [sample for sample in self._converted if id(sample) not in kept]
        return accepted, *rest

    @extends(SamplesGenerator)
    def _dispatch_prompts_to_vllm(
        self, prompts: list[str], labels: list, *, images: list | None = None, **kwargs: Any
    ) -> list:
        """Send prompts to the engines. Returns Ray's reference to the responses of each."""
        columns = {"prompt": prompts, "label": labels, "images": images or [None] * len(prompts)}
        rows = zip(*columns.values(), strict=True)
        return self._calls.send([dict(zip(columns, row, strict=True)) for row in rows], **kwargs)

"""The rows of a plan: what each algorithm does, and what each model takes on each number of GPUs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bapo_openrlhf.workbench.planning.constants import Constants
from bapo_openrlhf.workbench.planning.groups import average_groups, critic_groups, replayable_groups, rollouts
from bapo_openrlhf.workbench.planning.memory import TOKEN, Memory, gpu_memory, replay_bytes
from bapo_openrlhf.workbench.planning.shapes import ModelShape
from bapo_openrlhf.workbench.planning.workload import Algorithm, Workload

Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What a plan is made from. `gpus` are in rising order, `gpu` is their kind, `steps` are those of the whole run."""

    shapes: Sequence[ModelShape]
    gpus: Sequence[int]
    workload: Workload
    constants: Constants
    steps: int
    gpu: str

    def counts(self, algorithm: Algorithm) -> Row:
        """What an algorithm does on any model and number of GPUs.

        Groups, `responses` and the tokens of responses in the updates of actor and critic (`update_tokens`,
        `critic_tokens`) are those of an average step; `rollouts` are the responses of the whole run. The buffers are on
        the host. `replay_bytes` are expected, and `replay_bytes_most` are those of a buffer full of the longest
        samples. `hard_bytes` are those of a full hard buffer, which holds only prompts.
        """
        workload, constants = self.workload, self.constants
        groups, (prompt, response) = average_groups(algorithm, workload, constants), workload.lengths(constants)
        size, buffers = workload.args.rollout.n_samples_per_prompt, float(algorithm.adapted)
        stored, most = buffers * replayable_groups(workload, constants), buffers * workload.replay_capacity
        return {
            "method": algorithm.name,
            **asdict(groups),
            "trained": groups.trained,
            "responses": size * groups.generated,
            "update_tokens": size * groups.trained * response,
            "critic_tokens": size * critic_groups(algorithm, workload, groups, self.steps) * response,
            "rollouts": rollouts(algorithm, workload, constants, self.steps),
            "replay_bytes": replay_bytes(workload, prompt, response, stored),
            "replay_bytes_most": replay_bytes(workload, workload.prompt_tokens, workload.response_tokens, most),
            "hard_bytes": buffers * workload.args.adapt.buffer_size * TOKEN * prompt,
        }

    def sizes(self, shape: ModelShape, gpus: int, algorithm: Algorithm) -> Memory:
        return gpu_memory(shape, self.workload, self.constants, algorithm, gpus)

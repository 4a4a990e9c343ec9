"""Images on their way from the generated samples to the actor."""

from types import SimpleNamespace

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import make_experience_batch
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from openrlhf.utils.vlm_utils import merge_mm_train_inputs

from bapo_openrlhf.training.trainer.dealing import training_shares
from bapo_openrlhf.training.trainer.generated import groups_of
from bapo_openrlhf.training.trainer.samples import answers_of, samples_of
from bapo_openrlhf.training.wire.packing import packed, unpacked
from bapo_openrlhf.training.worker.whole_batch import WholeBatchReplayBuffer

SIZE = 4  # G


@pytest.fixture
def samples():
    """Of 3 prompts with the same words and label, each with images of its own, the second with two.

    As with Qwen's processor, an image gives as many rows of `pixel_values` as it is wide.
    """
    result = []
    for number, widths in enumerate(([2], [3, 3], [4])):
        pixels = [torch.full((width, 3), 10.0 * number + place) for place, width in enumerate(widths)]
        about = {
            "prompt": "<image>Find x.",
            "label": "5",
            "images": [f"{number}{place}.png" for place in range(len(widths))],
            "mm_train_inputs": {
                "pixel_values": torch.cat(pixels),
                "image_grid_thw": torch.tensor([[1, 1, width] for width in widths]),
            },
            "extra_logs": {},
            "truncated": False,
        }
        for member in range(SIZE):
            reward, start = float(member % 2), 2 + len(widths)
            answer = about | {"reward": reward, "scores": reward, "action_ranges": [(start, start + 2)]}
            answer |= {"observation_tokens": [1, *[9] * len(widths), 2, 3 + member, 4]}
            answer |= {"rollout_log_probs": [0.0] * start + [-0.5] * 2}
            result.append(SamplesGenerator._process_response_into_experience(SimpleNamespace(), answer, max_len=64))
    return result


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("kept", [range(12), [8, 9, 10, 11, 4, 5, 6, 7], [5, 0, 11]])
def test_every_sample_reaches_the_actor_with_its_own_images(samples, kept, ranks):
    """Reordered and dealt to ranks, as between the experience maker and the loss; fillers too."""
    own = samples_of(groups_of(answers_of(samples, SIZE), first_uid=0, step=1, weights_version=1))
    rows, reached = [own[place] for place in kept], []
    for share in unpacked(packed(list(training_shares(rows, ranks)))):
        buffer = WholeBatchReplayBuffer(1)
        buffer.take(*share["experience"], *share["filler"], len(rows))
        for items in filter(None, (buffer.items, [buffer.filler])):
            trained = make_experience_batch(items)
            # by its tokens: the images of its prompt, and the number of the answer
            of = [next(n for n in kept if torch.equal(item.sequences, samples[n].sequences[0])
                       and item.images == samples[n].images) for item in items]  # fmt: skip
            reached += of if items is buffer.items else []
            inputs = merge_mm_train_inputs(trained.mm_train_inputs, "cpu")
            for name, merged in inputs.items():
                wanted = torch.cat([samples[index].mm_train_inputs[0][name] for index in of])
                assert torch.equal(merged, wanted) and merged.dtype == wanted.dtype
            # one image token for each image, in the same order
            tokens = [(sequence == 9).sum().item() for sequence in trained.sequences]
            assert tokens == [len(samples[index].images[0]) for index in of]
            assert inputs["image_grid_thw"].shape == (sum(tokens), 3)
    assert sorted(reached) == sorted(kept)

"""Images on their way through batch adaptation: rollout, buffers, checkpoint, re-evaluation, experience, actor."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator
from openrlhf.utils.vlm_utils import merge_mm_train_inputs, process_prompt_with_images
from PIL import Image

from bapo_openrlhf.adapt.buffers import HardBuffer, ReplayBuffer
from bapo_openrlhf.record.state_file import load_state, save_state
from bapo_openrlhf.training.trainer.dealing import training_shares
from bapo_openrlhf.training.trainer.generated import groups_of
from bapo_openrlhf.training.trainer.samples import answers_of, samples_of
from bapo_openrlhf.training.wire.packing import packed, unpacked
from bapo_openrlhf.training.worker.whole_batch import WholeBatchReplayBuffer

SIZE = 4  # G


class Processor:
    """A vision processor as OpenRLHF calls it: one token an image, and its colour as the image's tensors.

    As with Qwen's, an image gives as many rows of `pixel_values` as it is wide.
    """

    def __call__(self, *, text, images=None, **kwargs):
        rows = [np.asarray(image)[0].astype(np.float32) for image in images]
        return {
            "input_ids": torch.tensor([[1, *[9] * len(images), 2]]),
            "attention_mask": torch.ones(1, 2 + len(images), dtype=torch.long),
            "mm_token_type_ids": torch.zeros(1, 2 + len(images), dtype=torch.long),
            "pixel_values": torch.from_numpy(np.concatenate(rows)),
            "image_grid_thw": torch.tensor([[1, 1, len(row)] for row in rows]),
        }


def sample(prompt, reward, tokens, start, **answer):
    """As OpenRLHF makes it of what an engine returns. The policy generated the tokens from `start` on."""
    log_probs = [0.0] * start + [-0.5] * (len(tokens) - start)
    answer |= {"prompt": prompt, "reward": reward, "scores": reward, "extra_logs": {}, "truncated": False}
    answer |= {"observation_tokens": tokens, "action_ranges": [(start, len(tokens))], "rollout_log_probs": log_probs}
    return SamplesGenerator._process_response_into_experience(SimpleNamespace(), answer, max_len=64)


@pytest.fixture
def samples(tmp_path):
    """Of 3 prompts with the same words and label, each with images of its own, the second with two."""
    result = []
    for number, images in enumerate((1, 2, 1)):
        paths = []
        for place in range(images):
            path = tmp_path / f"{number}{place}.png"
            Image.new("RGB", (2 + number + place, 1), (10 * number, place, 7)).save(path)
            paths.append(str(path))
        for member in range(SIZE):
            ids, mm_train_inputs, _ = process_prompt_with_images(Processor(), "<image>Find x.", paths)
            given = {"label": "5", "images": paths, "mm_train_inputs": mm_train_inputs}
            tokens = [*ids, 3 + member, 4]
            result.append(sample("<image>Find x.", float(member % 2), tokens, len(ids), **given))
    return result


def images_of(sample: Experience) -> tuple:
    """All that a sample has of its images, to be compared."""
    (inputs,) = sample.mm_train_inputs
    return sample.images, {name: (tensor.dtype, tensor.tolist()) for name, tensor in inputs.items()}


def grouped(samples):
    return groups_of(answers_of(samples, SIZE), first_uid=0, step=1, weights_version=1)


def test_through_the_buffers_and_a_checkpoint(samples, tmp_path):
    groups = grouped(samples)
    hard, replay = HardBuffer(8), ReplayBuffer(8, max_age=3)
    for group in groups:
        hard.add(group)
        replay.add(group)
    save_state(tmp_path, {"hard": hard.state_dict(), "replay": replay.state_dict()})
    state = load_state(tmp_path)
    resumed_hard, resumed_replay = HardBuffer(8), ReplayBuffer(8, max_age=3)
    resumed_hard.load_state_dict(state["hard"])
    resumed_replay.load_state_dict(state["replay"])
    assert [entry.prompt for entry in resumed_hard.oldest(8)] == [group.prompt for group in groups]
    assert [group.prompt.id for group in resumed_replay] == [group.prompt.id for group in groups]
    drawn = resumed_replay.sample(3, np.random.default_rng(0), lambda group: True)
    for actual, wanted in zip(samples_of(drawn), samples, strict=True):
        assert images_of(actual) == images_of(wanted)


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("kept", [range(12), [8, 9, 10, 11, 4, 5, 6, 7], [5, 0, 11]])
def test_every_sample_reaches_the_actor_with_its_own_images(samples, kept, ranks):
    """Reordered and dealt to ranks, as between the experience maker and the loss; fillers too."""
    own = samples_of(grouped(samples))
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


def test_texts_between_images(samples):
    """A mixed data set: rows without images stay without."""
    text = sample("2+2", 1.0, [1, 2, 3], 2, label="4", images=None, mm_train_inputs=None)
    groups = groups_of(answers_of([text] * SIZE + samples, SIZE), first_uid=0, step=0, weights_version=0)
    back = samples_of(groups)
    assert (back[0].images, back[0].mm_train_inputs) == ([None], [None])
    batch = Experience.concat_experiences([back[0], back[SIZE], back[1]], 0)
    merged = merge_mm_train_inputs(batch.mm_train_inputs, "cpu")
    assert torch.equal(merged["pixel_values"], samples[0].mm_train_inputs[0]["pixel_values"])

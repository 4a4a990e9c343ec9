"""Weights that cannot be loaded are refused by what their files say, before a model loads."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch.model_files import INDEX, WHOLE, tensors_of


def refused(folder) -> str:
    with pytest.raises(ConfigError) as error:
        tensors_of("critic.model_name_or_path", folder)
    return str(error.value).removeprefix(f"critic.model_name_or_path is {folder}; ")


def test_the_tensors_of_one_file_and_of_several(tmp_path):
    assert tensors_of("f", tmp_path) == set()  # of a .bin file nothing is said
    save_file({"a": np.zeros((2, 3)), "b": np.zeros(0)}, tmp_path / WHOLE, metadata={"format": "pt"})
    assert tensors_of("f", tmp_path) == {"a", "b"}
    for name in "cd":
        save_file({name: np.ones(4)}, tmp_path / f"{name}.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {name: f"{name}.safetensors" for name in "cd"}}))
    assert tensors_of("f", tmp_path) == {"c", "d"}  # transformers also reads the index first
    (tmp_path / "d.safetensors").unlink()
    assert refused(tmp_path) == f"{INDEX} names the file d.safetensors, which is not there"


@pytest.mark.parametrize("size", [0, 7, 8, 40, -1])
def test_a_file_that_is_cut_short(tmp_path, size):
    save_file({"a": np.zeros(100)}, tmp_path / WHOLE)
    content = (tmp_path / WHOLE).read_bytes()[:size]
    (tmp_path / WHOLE).write_bytes(content)
    assert refused(tmp_path).startswith(f"{WHOLE} has {len(content)} bytes and is no whole safetensors file; ")


def test_the_pointer_that_git_leaves_in_the_place_of_a_large_file(tmp_path):
    (tmp_path / WHOLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1500\n")
    assert refused(tmp_path).endswith("if git made it, `git lfs pull` gets the weights")

"""The file of the metrics: what a table stands for, and that a bad one is named."""

from pathlib import Path

import pytest
import yaml

from bapo_openrlhf.adapt.metric import ADAPTED, ALL, ATTEMPTS, Metric, declare
from bapo_openrlhf.methods import BAPO
from bapo_openrlhf.record import metrics

PACKAGE = Path(metrics.__file__).parents[1]


@pytest.fixture
def read(tmp_path):
    def read(table):
        path = tmp_path / "mine.yaml"
        path.write_text("Words:\n  - " + table.replace("\n", "\n    ") + "\n")
        return metrics._read(path)["Words"]

    return read


def test_a_table_has_the_keys_of_a_metric(read):
    rows = 'metrics: |\n  a/b | steps | A b | Eq. 1 | One: "two",\n    three | 3.\n  c/d | | C d | | Four.'
    one = Metric("a/b", "steps", "A b", 'One: "two", three |3.', "Eq. 1")
    assert read(rows.replace("three | 3", "three |3")) == (one, Metric("c/d", "", "C d", "Four."))
    every = read("algorithms: all\nwhen: steps with c\noptional: true\nmetrics: a | b | c | d | e.")
    assert every == (Metric("a", "b", "c", "e.", "d", "steps with c", ALL, True),)
    some = read("algorithms: [ppo, grpo]\nmetrics: a | b | c | d | e.")
    assert some == declare("a | b | c | d | e.", ("ppo", "grpo"))
    assert read("metrics: a | b | c | d | e.")[0].algorithms == ADAPTED


def test_a_table_can_stand_for_metrics_of_methods(read):
    assert read("from: BAPO") == tuple(metric for metric in BAPO.METRICS if metric != ATTEMPTS)
    assert read("from: ATTEMPTS") == (ATTEMPTS,)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.yaml")), ids=lambda path: path.name)
def test_no_key_of_a_file_of_the_package_is_there_twice(path):
    """YAML would take the last one, without a word."""

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node, deep=False):
            keys = [key.value for key, _ in node.value]
            assert len(set(keys)) == len(keys), keys
            return super().construct_mapping(node, deep)

    text = path.read_text(encoding="utf-8").replace("\n$stack\n", "\n")  # lines that `init` puts in
    yaml.load(text, Loader)

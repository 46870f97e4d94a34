"""Whole jobs of the matrix in which vLLM generates, with some of all other options."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.matrix.checks import check_job
from tests.matrix.setting import Setting, open_setting
from tests.matrix.test_matrix import each_value

VLLM = {"maxModelLen": 64, "enforceEager": True, "gpuMemoryUtilization": 0.5, "extraArgs": {"max_num_seqs": 16}}
JOBS = 3

pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def setting(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    with open_setting(tmp_path_factory.mktemp("options"), tiny_model) as made:
        yield made


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.nightly) for number in range(1, JOBS))])
def test_jobs_with_some_of_every_option_train(setting: Setting, number: int) -> None:
    jobs = each_value()
    left_out = dict.fromkeys(("learning.compile", "learning.processes", "tracking.tensorboard"), 0)
    combination = jobs[number * len(jobs) // JOBS] | left_out
    file = setting.write(combination, f"vllm-{number}")
    document = yaml.safe_load(file.read_text())
    document["spec"]["generation"] |= {"engine": "vllm", "vllm": VLLM if number else {}}
    file.write_text(yaml.safe_dump(document))
    check_job(setting, file)

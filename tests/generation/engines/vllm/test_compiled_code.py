"""Code that vLLM compiled for one version of the weights, found again for the next one in another folder."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhfless_functions.generation.engines.base import SequenceResult
from rlhfless_functions.generation.engines.transformers import TransformersEngine
from tests.generation.engines.shares import assert_same, generate, save_model, settings_of, share, version

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

ROOT = Path(__file__).resolve().parents[4]
START = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from rlhfless_functions.generation.engines.vllm.engine import VllmEngine
from rlhfless_functions.settings import EngineSettings, VllmSettings
from tests.generation.engines.shares import generate, settings_of, share, version

folder = Path(sys.argv[1])
engine = VllmEngine(EngineSettings(kv_budget_tokens=1024, vllm=VllmSettings(max_model_len=128, enforce_eager=False)))
engine.load(settings_of(folder), version(folder))
print(json.dumps([asdict(result) for result in generate(engine, share(2, 2)).values()]))
"""
Names = set[str]


@pytest.fixture
def start(tmp_path: Path) -> Callable[[Path], tuple[list[SequenceResult], Names]]:
    """Starts vLLM, compiling, in a process of its own: its samples, and the names in the cache of compiled code."""
    cache = tmp_path / "cache"
    environment = os.environ | {
        "VLLM_CACHE_ROOT": str(cache),
        "TORCHDYNAMO_DISABLE": "0",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "functions"))),
    }

    def started(folder: Path) -> tuple[list[SequenceResult], Names]:
        command = [sys.executable, "-c", START, str(folder)]
        said = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
        results = [SequenceResult(**result) for result in json.loads(said.splitlines()[-1])]
        return results, {path.name for path in (cache / "torch_compile_cache" / "torch_aot_compile").iterdir()}

    return started


@pytest.mark.timeout(600)
def test_code_for_another_folder_of_weights_is_found_again_and_samples_from_these(
    start: Callable[[Path], tuple[list[SequenceResult], Names]], tmp_path: Path, tiny_model: Path
) -> None:
    folders = [save_model(tmp_path / f"version-{seed}", tiny_model, seed=seed) for seed in range(2)]
    _, names = start(folders[0])
    assert len(names) == 1

    results, after = start(folders[1])
    assert after == names
    engine = TransformersEngine()
    engine.load(settings_of(folders[1]), version(folders[1]))
    assert_same({(result.prompt, result.index): result for result in results}, generate(engine, share(2, 2)))


def test_a_model_of_another_shape_has_code_of_its_own(tmp_path: Path, tiny_model: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    import rlhfless_functions.generation.engines.vllm.extension  # noqa: F401 - as vLLM's workers do

    def name(folder: Path) -> str:
        return EngineArgs(str(folder), skip_tokenizer_init=True).create_model_config().compute_hash()

    shape = save_model(tmp_path / "a", tiny_model)
    assert name(shape) == name(save_model(tmp_path / "b", tiny_model, seed=1))
    assert name(shape) != name(save_model(tmp_path / "c", tiny_model, intermediate_size=96))

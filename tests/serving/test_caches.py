"""One folder for everything that an instance downloads and compiles."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhfless_functions.serving.caches import FOLDERS, keep_caches

WHERE = """
import json, os
from rlhfless_functions.serving.caches import keep_caches
keep_caches(os.environ["CACHE"], os.environ)
import huggingface_hub.constants, torch._inductor.runtime.cache_dir_utils as inductor
print(json.dumps([huggingface_hub.constants.HF_HUB_CACHE, inductor.cache_dir()]))
"""


@pytest.mark.slow
def test_libraries_that_are_imported_later_use_it(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in FOLDERS} | {"CACHE": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", WHERE], env=environment, check=True, stdout=subprocess.PIPE).stdout
    assert json.loads(said) == [str(tmp_path / "huggingface" / "hub"), str(tmp_path / "torchinductor")]


def test_what_the_environment_says_stays(tmp_path: Path) -> None:
    environment = {"HF_HOME": "/models"}
    keep_caches(str(tmp_path / "made"), environment)
    assert environment.pop("HF_HOME") == "/models"
    assert environment.keys() == FOLDERS.keys() - {"HF_HOME"}
    assert all(Path(folder).parent == tmp_path / "made" for folder in environment.values())


def test_a_folder_that_cannot_be_used_is_named_and_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    environment: dict[str, str] = {}
    with caplog.at_level(logging.WARNING):
        keep_caches(str(tmp_path / "file" / "cache"), environment)
    assert not environment
    assert "RLHFLESS_CACHE" in caplog.text and "give this user permission" in caplog.text

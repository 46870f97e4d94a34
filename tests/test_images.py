"""What the images are made of; that they run is e2e's to show."""

import shutil
import sys
from importlib.machinery import SourceFileLoader
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlhfless_functions.generation.engines import choice
from rlhfless_functions.generation.engines.vllm import installation
from rlhfless_functions.settings import EngineSettings, ModelSettings

ROOT = Path(__file__).parent.parent
REMOVED = {"setuptools"}
"""What torch asks for to build C++ extensions; the operator's Dockerfile removes it with pip."""
VARIANTS = {"cuda": "vllm", "cpu": "vllm-cpu", "slim": "functions"}
"""Of the functions' image, with the extra of pyproject.toml that each is for."""


def script(name: str, root: Path = ROOT) -> ModuleType:
    """A script of images/, loaded but not run."""
    loader = SourceFileLoader(f"images_{name}", str(root / "images" / name))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.path.insert(0, str(root / "images"))
    try:
        loader.exec_module(module)
    finally:
        sys.path.remove(str(root / "images"))
    return module


def requirements(*extras: str) -> list[str]:
    found: list[str] = script("requirements.py").requirements((ROOT / "pyproject.toml").read_text(), list(extras))
    return found


def lock_of(variant: str) -> str:
    return f"images/functions/{variant}.txt"


def pins(lock: str) -> dict[str, str]:
    """The version of each package by its normalized name; a lock has nothing but these."""
    lines = [line.split("==") for line in (ROOT / lock).read_text().splitlines()]
    found = {canonicalize_name(name): version for name, version in lines}
    assert len(found) == len(lines), f"{lock} names a package twice"
    return found


def closure(wanted: list[str], without: frozenset[str] = frozenset()) -> set[str]:
    """The normalized names of these requirements and all that they require here, but for some and what they require."""
    found: set[tuple[str, str]] = set()
    pending = [(Requirement(text), "") for text in wanted]
    while pending:
        requirement, extra = pending.pop()
        if requirement.name in without:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for chosen in ("", *requirement.extras):
            key = (canonicalize_name(requirement.name), chosen)
            if key not in found:
                found.add(key)
                pending += [(Requirement(text), chosen) for text in requires(requirement.name) or []]
    return {name for name, _ in found}


def test_the_operators_image_has_no_torch() -> None:
    assert not closure(requirements("operator")) & {"torch", "transformers", "pyarrow", "datasets"}


def test_everything_in_the_operators_image_is_pinned_by_the_lock() -> None:
    assert closure(requirements("operator")) - REMOVED <= pins("constraints.txt").keys()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_lock_of_the_functions_has_all_that_they_need(variant: str) -> None:
    assert closure(requirements("functions")) <= pins(lock_of(variant)).keys()


@pytest.mark.parametrize(("variant", "extra"), VARIANTS.items())
def test_a_lock_has_what_its_extra_asks_for(variant: str, extra: str) -> None:
    locked = pins(lock_of(variant))
    for requirement in map(Requirement, requirements(extra)):
        if requirement.name != "rlhfless":
            assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement


def test_locks_agree_on_what_they_share() -> None:
    """What is tested on a CPU is what runs on a GPU; and the image without vLLM has what `make test` has."""
    cuda, cpu, slim = (pins(lock_of(variant)) for variant in VARIANTS)
    differing = {name for name in cuda.keys() & cpu.keys() if cuda[name] != cpu[name]}
    assert differing == {"torch", "apache-tvm-ffi"}, "vLLM for GPUs names another release of apache-tvm-ffi"
    assert {lock["torch"].partition("+")[0] for lock in (cuda, cpu, slim)} == {cuda["torch"]}
    development = pins("constraints.txt") | {"torch": slim["torch"]}
    assert {name: version for name, version in slim.items() if name in development}.items() <= development.items()


@pytest.mark.parametrize(
    ("variant", "gpu", "chosen"),
    [("cuda", True, "vllm"), ("cuda", False, "transformers"), ("cpu", False, "vllm"), ("slim", False, "transformers")],
)
def test_auto_chooses_what_an_image_has_for_the_device(
    variant: str, gpu: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = pins(lock_of(variant))

    def version(package: str) -> str:
        if package not in locked:
            raise PackageNotFoundError(package)
        return locked[package]

    monkeypatch.setattr(installation, "version", version)
    monkeypatch.setattr(choice, "version", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert choice.choose_engine(EngineSettings(), ModelSettings(source="m")).name == chosen


def test_the_image_for_gpus_has_cudas_libraries_and_the_others_have_none() -> None:
    cuda, cpu, slim = (pins(lock_of(variant)) for variant in VARIANTS)
    assert "+" not in cuda["torch"] and {"triton", "nvidia-nccl-cu13", "nvidia-cublas"} <= cuda.keys()
    for lock in (cpu, slim):
        assert lock["torch"].endswith("+cpu") and not [name for name in lock if name.startswith("nvidia-")]
    assert "torchvision" not in cpu, "beside torch's CPU build it breaks transformers"


def test_every_variant_of_the_dockerfile_has_a_lock() -> None:
    dockerfile = (ROOT / "images" / "functions" / "Dockerfile").read_text()
    assert "images/functions/${VARIANT}.txt" in dockerfile and "ARG VARIANT=cuda" in dockerfile
    assert {path.stem for path in (ROOT / "images" / "functions").glob("*.txt")} == VARIANTS.keys()
    built = {image.variant for image in script("build").IMAGES.values() if image.variant}
    assert built == VARIANTS.keys() - {"cuda"}


def test_an_unknown_extra_is_refused_by_name() -> None:
    with pytest.raises(SystemExit, match="no extra 'opreator', only"):
        requirements("opreator")


def test_tests_headers_and_other_services_are_trimmed_and_nothing_else(tmp_path: Path) -> None:
    kept = ["numpy/core.py", "botocore/data/s3/a.json", "botocore/data/endpoints.json", "torch/bin/torch_shm_manager"]
    trimmed = ["numpy/lib/tests/t.py", "botocore/data/ec2/a.json", "torch/include/a.h", "torch/bin/protoc"]
    for name in (*kept, *trimmed):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    unused = script("trim.py").unused
    found = [str(path.relative_to(tmp_path)) for path in unused(tmp_path, compiler=False)]
    assert found == ["botocore/data/ec2", "numpy/lib/tests", "torch/bin/protoc", "torch/include"]
    assert tmp_path / "torch" / "include" not in unused(tmp_path, compiler=True), "torch compiles kernels with them"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The part of a checkout that images are made from, with one module of each package."""
    shutil.copytree(ROOT / "images", tmp_path / "images", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in ("operator", "functions"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "module.py").write_text("x = 1\n")
    return tmp_path


def test_a_tag_changes_with_what_its_image_is_made_from_alone(checkout: Path) -> None:
    digest_of_inputs = script("build", checkout).digest_of_inputs
    operator, functions = digest_of_inputs("operator"), digest_of_inputs("functions-slim")
    with_vllm = digest_of_inputs("functions-cpu")

    (checkout / "operator" / "__pycache__").mkdir()
    (checkout / "operator" / "__pycache__" / "module.pyc").write_text("compiled")
    assert digest_of_inputs("operator") == operator

    (checkout / "operator" / "module.py").write_text("x = 2\n")
    assert digest_of_inputs("operator") != operator
    assert digest_of_inputs("functions-slim") == functions

    operator = digest_of_inputs("operator")
    (checkout / "functions" / "module.py").write_text("x = 2\n")
    assert digest_of_inputs("operator") != operator, "the operator's image has the functions' contract in it"
    assert digest_of_inputs("functions-slim") != functions
    assert digest_of_inputs("functions-cpu") != with_vllm

    operator, functions = digest_of_inputs("operator"), digest_of_inputs("functions-slim")
    with_vllm = digest_of_inputs("functions-cpu")
    with (checkout / "images" / "functions" / "cpu.txt").open("a") as lock:
        lock.write("more==1\n")
    assert digest_of_inputs("functions-cpu") != with_vllm
    assert (digest_of_inputs("operator"), digest_of_inputs("functions-slim")) == (operator, functions)

"""Wheels arrive whole at a machine without a network, however many parts they need."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu.carry import INCOMPLETE, NEEDED, canonical, join, keep, lacking, pack
from benchmarks.shared.places import REPOSITORY


def save_wheel(folder: Path, name: str, size: int) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", f"TEXT = {'x' * size!r}\n")
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return path


def receive(part: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "benchmarks/gpu/carry.py"), "receive", str(part)]
    places = ["--store", str(tmp_path / "store"), "--site", str(tmp_path / "site")]
    return subprocess.run([*command, *places], capture_output=True, text=True, check=False)


def test_parts_that_arrive_one_after_the_other_are_installed_with_the_last(tmp_path: Path) -> None:
    wheels = [save_wheel(tmp_path / "wheels", name, 5000) for name in ("carried_one", "carried_two")]
    *first, last = pack(wheels, tmp_path / "parts", 4000)
    assert len(first) >= 2
    for number, part in enumerate(first):
        received = receive(part, tmp_path)
        assert received.returncode == INCOMPLETE
        assert f"waiting for part-{number + 1:03}.bin" in received.stdout
    received = receive(last, tmp_path)
    assert received.returncode == 0, received.stderr
    assert sorted(each.name for each in (tmp_path / "site").glob("*.py")) == ["carried_one.py", "carried_two.py"]


def test_wheels_are_the_same_bytes_after_any_size_of_part(tmp_path: Path) -> None:
    wheel = save_wheel(tmp_path / "wheels", "carried", 3000)
    for size in (100, 1000, 10**6):
        folders = pack([wheel], tmp_path / f"parts-{size}", size)
        assert all((folder / f"{folder.name}.bin").stat().st_size <= size for folder in folders)
        for folder in reversed(folders):
            missing = keep(folder, tmp_path / f"store-{size}")
        assert missing == []
        (joined,) = join(tmp_path / f"store-{size}", tmp_path / f"joined-{size}")
        assert joined.read_bytes() == wheel.read_bytes()


def test_a_part_that_was_damaged_is_not_kept(tmp_path: Path) -> None:
    wheel = save_wheel(tmp_path / "wheels", "carried", 3000)
    folder, *_ = pack([wheel], tmp_path / "parts", 1000)
    part = folder / "part-000.bin"
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    with pytest.raises(SystemExit, match=r"part-000\.bin was damaged on the way, or is of another pack"):
        keep(folder, tmp_path / "store")
    assert list((tmp_path / "store").iterdir()) == []


def test_a_folder_with_parts_is_not_packed_into_again(tmp_path: Path) -> None:
    wheel = save_wheel(tmp_path / "wheels", "carried", 10)
    pack([wheel], tmp_path / "parts", 10**6)
    with pytest.raises(SystemExit, match="is not empty"):
        pack([wheel], tmp_path / "parts", 10**6)


def test_only_what_is_not_there_is_carried_and_never_torch() -> None:
    everything = lacking(NEEDED, [])
    assert {"pydantic", "trl", "transformers", "datasets", "fastapi"} <= everything.keys()
    assert not {"torch", "rlhfless", "kopf"} & everything.keys()
    there = ["Transformers==5.17.0", "pydantic", "", "typing_extensions @ file:///somewhere", "datasets==2.0.0"]
    fewer = lacking(NEEDED, there)
    assert not {"transformers", "pydantic", "pydantic-core", "typing-extensions"} & fewer.keys()
    assert "datasets" in fewer, "the one that is there is too old"
    assert fewer.items() <= everything.items()
    assert canonical("Typing_Extensions") == "typing-extensions"

"""Carries wheels to a machine without a network, in parts that are small enough for what carries them.

    python benchmarks/gpu/carry.py pack FOLDER --there FILE [--python 3.12] [--part 60]   # here
    python benchmarks/gpu/carry.py receive FOLDER --store STORE --site SITE               # there, once for each part

`pack` downloads what the GPU benchmark needs beyond what is there (FILE: a name a line, as `pip list --format freeze`
prints it), in the versions that are installed here, and writes parts of at most so many MiB to FOLDER, each in a folder
of its own. torch is never carried: it is there, built for the machine's driver.

`receive` keeps the parts that have arrived. Once all have, it compares them with their checksums, and installs the
wheels into SITE, which belongs on PYTHONPATH. Until then it says what is missing, and ends with status 3.
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

OURS = "rlhfless"
NEEDED = ("rlhfless[functions]", "trl", "pytest-asyncio", "pytest-timeout", "hypothesis")
"""What the parts of `measure.py` run on, conformance included."""
NEVER = frozenset({"torch", "triton", "setuptools"})
MIB = 2**20
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
INCOMPLETE = 3
"""The exit status while parts are missing."""


def canonical(name: str) -> str:
    """Return a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def lacking(needed: Iterable[str], there: Iterable[str]) -> dict[str, str]:
    """Return the version of each package that these need and that is not there, as installed here.

    Args:
        needed: requirements, extras included.
        there: names, or lines of `pip list --format freeze`.
    """
    lines = [re.split(r"==| @ ", line.strip()) for line in there if line.strip()]
    known = {canonical(name): (version or [""])[0] for name, *version in lines}
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(each) for each in needed]
    while waiting:
        requirement = waiting.pop()
        name = canonical(requirement.name)
        if (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        if name in NEVER or (name in known and _fits(known[name], requirement)):
            continue
        try:
            package = distribution(name)
        except PackageNotFoundError:
            sys.exit(f"{name} is needed and not installed here: install it, or name it in the file of what is there")
        if name != OURS:
            found[name] = package.version
        for each in map(Requirement, package.requires or []):
            environments = [{"extra": extra} for extra in ("", *requirement.extras)]
            if each.marker is None or any(each.marker.evaluate(environment) for environment in environments):
                waiting.append(each)
    return dict(sorted(found.items()))


def _fits(version: str, requirement: Requirement) -> bool:
    """Return whether a version will do; one that is not known is thought to."""
    return not version[:1].isdigit() or requirement.specifier.contains(version, prereleases=True)


def download(packages: dict[str, str], to: Path, python: str) -> None:
    """Fetch each package's wheel, for that Python on Linux."""
    platforms = [option for platform in PLATFORMS for option in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", *platforms, "--dest", str(to)]
    subprocess.run([*command, *(f"{name}=={version}" for name, version in packages.items())], check=True)


def pack(wheels: Iterable[Path], to: Path, part_bytes: int) -> list[Path]:
    """Write wheels into parts of at most so many bytes, each beside the list of all parts, and return their folders."""
    if to.exists() and any(to.iterdir()):
        sys.exit(f"{to} is not empty: name another folder, so that no part of an earlier pack is carried along")
    with tempfile.TemporaryFile() as whole:
        with zipfile.ZipFile(whole, "w", zipfile.ZIP_STORED) as archive:
            for wheel in sorted(wheels):
                archive.write(wheel, wheel.name)
        whole.seek(0)
        folders, sums = [], []
        while content := whole.read(part_bytes):
            folder = to / f"part-{len(folders):03}"
            folder.mkdir(parents=True)
            (folder / f"{folder.name}.bin").write_bytes(content)
            folders.append(folder)
            sums.append(hashlib.sha256(content).hexdigest())
    for folder in folders:
        (folder / "parts.json").write_text(json.dumps(sums))
    return folders


def keep(arrived: Path, store: Path) -> list[str]:
    """Keep what has arrived, and return the names of the parts that are still missing.

    Raises:
        SystemExit: for a part that is not the one that was packed.
    """
    store.mkdir(parents=True, exist_ok=True)
    (listed,) = list(arrived.rglob("parts.json"))[:1] or sys.exit(f"{arrived} has no parts.json: carry a whole part")
    sums = dict(_named(json.loads(listed.read_text())))
    for file in arrived.rglob("part-*.bin"):
        if hashlib.sha256(file.read_bytes()).hexdigest() != sums.get(file.name):
            sys.exit(f"{file.name} was damaged on the way, or is of another pack: carry it again")
        shutil.copyfile(file, store / file.name)
    return [name for name in sums if not (store / name).exists()]


def join(store: Path, to: Path) -> list[Path]:
    """Write the wheels of all parts into a folder."""
    with tempfile.TemporaryFile() as whole:
        for part in sorted(store.glob("part-*.bin")):
            whole.write(part.read_bytes())
        with zipfile.ZipFile(whole) as archive:
            archive.extractall(to)
    return sorted(to.iterdir())


def _named(sums: list[str]) -> Iterator[tuple[str, str]]:
    return ((f"part-{number:03}.bin", each) for number, each in enumerate(sums))


def main() -> None:
    """Pack or receive."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack")
    packing.add_argument("folder", type=Path)
    packing.add_argument("--there", type=Path, required=True, help="names of the packages that are there, one a line")
    packing.add_argument("--python", default="3.12", help="the Python there")
    packing.add_argument("--part", type=int, default=60, help="MiB of a part")
    receiving = commands.add_parser("receive")
    receiving.add_argument("folder", type=Path)
    receiving.add_argument("--store", type=Path, required=True)
    receiving.add_argument("--site", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as wheels:
        if arguments.command == "pack":
            packages = lacking(NEEDED, arguments.there.read_text().splitlines())
            download(packages, Path(wheels), arguments.python)
            folders = pack(Path(wheels).iterdir(), arguments.folder, arguments.part * MIB)
            size = sum(file.stat().st_size for file in Path(wheels).iterdir()) / MIB
            print(f"{len(packages)} wheels, {size:.1f} MiB, in {len(folders)} parts: {', '.join(packages)}")
            return
        if missing := keep(arguments.folder, arguments.store):
            print(f"waiting for {', '.join(missing)}")
            sys.exit(INCOMPLETE)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        found = map(str, join(arguments.store, Path(wheels)))
        subprocess.run([*command, "--upgrade", "--target", str(arguments.site), *found], check=True)


if __name__ == "__main__":
    main()

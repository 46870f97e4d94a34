"""Make this environment's packages smaller: no tests, no services other than S3, C++ headers only beside a compiler.

Only the standard library; runs in the image, in the layer that installs the packages.
"""

import py_compile
import shutil
import site
from collections.abc import Iterator
from pathlib import Path

_UNUSED = (
    "**/tests",
    "torch/share",
    "torch/test",
    "torch/lib/*test*.so",
    "torch/testing/_internal/py312*",
    "pyarrow/include",
    "pyarrow/*flight*",
    "kubernetes/client/api",
    # The package itself is imported with kubernetes.aio; what is in it only when it is asked for.
    "kubernetes/client/models/[a-z]*",
)
_HEADERS = ("torch/include",)
_AWS = {"s3", "sso", "sso-oidc", "sts"}
"""Services of botocore: storage, and what credentials come from."""
_GENERATED = ("kubernetes/aio/client/api", "kubernetes/aio/client/models")
"""Code of which three quarters are docstrings: it is kept compiled, and without them."""
_TORCH_BINARIES = {"torch_shm_manager"}


def unused(packages: Path, *, compiler: bool) -> Iterator[Path]:
    """The files and folders below site-packages that are not needed, none inside another.

    Args:
        compiler: whether there is a C++ compiler, by which torch compiles kernels.
    """
    patterns = _UNUSED if compiler else _UNUSED + _HEADERS
    found = {path for pattern in patterns for path in packages.glob(pattern)}
    found |= {path for path in packages.glob("botocore/data/*") if path.is_dir() and path.name not in _AWS}
    found |= {path for path in packages.glob("torch/bin/*") if path.name not in _TORCH_BINARIES}
    return (path for path in sorted(found) if not found.intersection(path.parents))


def main() -> None:
    """Entry point."""
    for packages in map(Path, site.getsitepackages()):
        for path in unused(packages, compiler=shutil.which("g++") is not None):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        for source in [file for folder in _GENERATED for file in (packages / folder).glob("*.py")]:
            py_compile.compile(
                str(source),
                cfile=str(source.with_suffix(".pyc")),
                optimize=2,
                invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
                doraise=True,
            )
            source.unlink()


if __name__ == "__main__":
    main()

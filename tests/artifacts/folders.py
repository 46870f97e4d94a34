"""Published folders as their files' contents."""

from rlhfless_functions import artifacts


def publish(uri: str, files: dict[str, bytes]) -> None:
    with artifacts.publish(uri) as folder:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def content(uri: str) -> dict[str, bytes]:
    folder = artifacts.local_folder(uri)
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != artifacts.MANIFEST
    }

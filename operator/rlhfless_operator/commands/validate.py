"""`rlhfless validate`: check a job document."""

import typer

from rlhfless_operator.commands.options import JobFile, Settings
from rlhfless_operator.job.reading.validation import load_job


def validate(job_file: JobFile, settings: Settings = None) -> None:
    """Check a job document and its files, and print each fault with its field, line and remedy."""
    from rlhfless_operator.job.reading.experimental import experimental_options
    from rlhfless_operator.job.reading.file_contents import not_checked

    job = load_job(job_file, packages=True, settings=settings or ())
    typer.echo(f"{job_file}: {job.metadata.name} is a valid job")
    for line in not_checked(job, job_file.parent):
        typer.echo(f"  not checked: {line}")
    for option in experimental_options(job.spec):
        typer.echo(f"  experimental: {option} — off by default, and no gain on GPUs or a real cluster is shown yet")

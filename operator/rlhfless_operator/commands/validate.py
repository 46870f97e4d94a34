"""`rlhfless validate`: check job documents."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhfless_operator.commands.exits import complain, fail
from rlhfless_operator.commands.options import Settings
from rlhfless_operator.job.reading.validation import InvalidJobError, load_job


def validate(
    job_files: Annotated[list[Path], typer.Argument(help="The job documents (YAML).", metavar="JOB_FILE...")],
    data: Annotated[
        bool,
        typer.Option("--data", help="Also read the data as training does, and show the first prompts of each source."),
    ] = False,
    prompts: Annotated[
        int | None, typer.Option(min=0, help="With --data: number of prompts of each source to show; by default 2.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, a list with an object for each file.")] = False,
    settings: Settings = None,
) -> None:
    """Check job documents and their files, and print each fault with its field, line and remedy.

    The exit status is 2 if a document, a file of it or its data is invalid.
    """
    if prompts is not None and not data:
        fail("--prompts works only with --data; give both")
    if data:
        from rlhfless_operator.local.data_check import check_that_data_can_be_read

        check_that_data_can_be_read()
        prompts = 2 if prompts is None else prompts
    found = [_check(file, settings or (), prompts, quiet=as_json) for file in job_files]
    if as_json:
        typer.echo(json.dumps(found))
    raise typer.Exit(0 if all(each["valid"] for each in found) else 2)


def _check(job_file: Path, settings: Sequence[str], prompts: int | None, *, quiet: bool) -> dict[str, Any]:
    """Check one document, print what was found unless `quiet`, and return it for JSON.

    Args:
        prompts: number of prompts to show; None leaves the data unread.
    """
    from rlhfless_operator.job.reading.experimental import experimental_options
    from rlhfless_operator.job.reading.file_contents import not_checked
    from rlhfless_operator.job.reading.timing import depends_on_timing

    try:
        job = load_job(job_file, packages=True, settings=settings)
    except InvalidJobError as error:
        if not quiet:
            complain(str(error))
        faults = [
            {"field": each.path, "line": each.line or None, "message": each.message, "remedy": each.remedy}
            for each in error.faults
        ]
        return {"file": str(job_file), "valid": False, "faults": faults}
    unchecked, experimental = not_checked(job, job_file.parent), experimental_options(job.spec)
    timing = depends_on_timing(job.spec)
    checked = []
    if prompts is not None:
        from rlhfless_operator.local import data_check

        checked = data_check.check_data(job.resolve_paths(job_file.parent), prompts)
        if not checked:
            unchecked = [*unchecked, "spec.data: a rehearsal takes its prompts from a trace"]
    valid = not any(each.result.faults for each in checked)
    if not quiet:
        if valid:
            typer.echo(f"{job_file}: {job.metadata.name} is a valid job")
        for line in unchecked:
            typer.echo(f"  not checked: {line}")
        for option in experimental:
            typer.echo(f"  experimental: {option} — off by default, and no gain on GPUs or a real cluster is shown yet")
        for line in timing:
            typer.echo(f"  depends on timing: {line}")
        for each in checked:
            for line in data_check.describe(each):
                typer.echo(line)
            for fault in each.result.faults:
                complain(f"{job_file}: {each.field}: {fault}")
    found = {"file": str(job_file), "valid": valid, "name": job.metadata.name, "faults": []}
    datasets = [{"field": each.field, **each.result.model_dump(mode="json")} for each in checked]
    found |= {"not_checked": unchecked, "experimental": experimental, "timing": timing}
    return found | ({"data": datasets} if checked else {})

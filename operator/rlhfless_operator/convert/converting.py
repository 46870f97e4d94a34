"""Convert a configuration by the table of its framework."""

from rlhfless_operator.convert.conversion import Conversion
from rlhfless_operator.convert.openrlhf import convert_openrlhf
from rlhfless_operator.convert.reading import Configuration
from rlhfless_operator.convert.trl import convert_trl
from rlhfless_operator.convert.verl import convert_verl


def convert(configuration: Configuration, source: str, processes: int | None = None) -> Conversion:
    """Convert a configuration to a job.

    Args:
        configuration: what was read.
        source: name of its file.
        processes: number of processes that TRL runs with, if the file does not say.
    """
    fields, lost = configuration.fields, configuration.lost
    if configuration.peer == "trl":
        return convert_trl(fields, source, configuration.processes or processes, lost)
    if configuration.peer == "openrlhf":
        return convert_openrlhf(fields, source, lost)
    return convert_verl(fields, source, lost)

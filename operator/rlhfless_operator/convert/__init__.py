"""Jobs from the configurations of TRL's GRPO and of verl: `rlhfless convert`."""

from rlhfless_operator.convert.reading import UnreadableConfigurationError, read_configuration
from rlhfless_operator.convert.trl import convert_trl
from rlhfless_operator.convert.verl import convert_verl
from rlhfless_operator.convert.writing import job_yaml, table

__all__ = [
    "UnreadableConfigurationError",
    "convert_trl",
    "convert_verl",
    "job_yaml",
    "read_configuration",
    "table",
]

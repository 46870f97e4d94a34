"""Jobs from the configurations of TRL's GRPO and of verl: `rlhfless convert`.

- `reading`: read a configuration. `conversion`: convert it by its peer's table. `writing`: write the job and the
  report.
- `trl`: the table of TRL's fields. `trl_meanings` and `trl_algorithm`: their conversions. `trl_others`: fields that a
  job does not have.
- `verl`: the table of verl's fields. `verl_meanings`: their conversions. `verl_others`: fields that a job does not
  have.
"""

from rlhfless_operator.convert.reading import UnreadableConfigurationError, read_configuration
from rlhfless_operator.convert.trl import convert_trl
from rlhfless_operator.convert.verl import convert_verl
from rlhfless_operator.convert.writing import job_yaml, table

"""Jobs from the configurations of TRL's GRPO, verl and OpenRLHF: `rlhfless convert`.

- `reading/`: read a configuration. `shell/`: evaluate the shell script that it is in. `converting`: convert what was
  read. `conversion`: convert by a peer's table. `datasets`: sources of prompts from a peer's names. `writing`: write
  the job and the report.
- `trl`: the table of TRL's fields. `trl_meanings`, `trl_algorithm` and `trl_environments`: their conversions.
  `trl_others`: fields that a job does not have.
- `verl`: the table of verl's fields. `verl_meanings`, `verl_algorithm`: their conversions. `verl_others`: fields that
  a job does not have. `verl_engines`: fields of verl's engines, which change nothing that is learnt.
- `openrlhf`: the table of OpenRLHF's arguments. `openrlhf_meanings`: their conversions. `openrlhf_others`: arguments
  that a job does not have, and the names of older releases.
"""

from rlhfless_operator.convert.converting import convert
from rlhfless_operator.convert.reading import Configuration, Peer, UnreadableConfigurationError, read_configuration
from rlhfless_operator.convert.trl import convert_trl
from rlhfless_operator.convert.verl import convert_verl
from rlhfless_operator.convert.writing import job_yaml, table

"""Read a configuration: YAML, a shell script, or a Python script.

- `configuration`: read a file, and detect the framework. `fields`: fields as they were read; unknown values.
- `launches`: the command of a shell script that trains. `flags`: `--name value`. `overrides`: `name=value`.
- `python_script`: `GRPOConfig(...)` and `GRPOTrainer(...)` of a Python script, read as syntax.
  `loaded_data`: the datasets that it loads.
"""

from rlhfless_operator.convert.reading.configuration import read_configuration
from rlhfless_operator.convert.reading.fields import Configuration, Peer, UnreadableConfigurationError

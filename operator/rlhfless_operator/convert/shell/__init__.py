"""Shell scripts, evaluated as bash would evaluate them, without running a command.

- `scanning`: the ends of quotes and expansions. `parsing`: the commands of a script, which are `nodes`. `words`: expand
  a word. `parameters`: expand `${...}`. `patterns`: glob patterns and braces. `arithmetic`: `$((...))`.
  `conditions`: `[ ]` and `[[ ]]`.
- `values`: text that is known only when the script runs. `variables`: those of a script on its way. `builtins`: bash's
  own commands. `evaluation`: follow a script, and collect the commands that it would start.

No parser that is well kept fits: bashlex has the GPL and reads neither arithmetic nor arrays; tree-sitter's grammar of
bash joins commands of two lines (`X="a" Y+=b` and the next). The tests compare this one with bash itself.
"""

from rlhfless_operator.convert.shell.evaluation import Command, evaluate
from rlhfless_operator.convert.shell.scanning import ShellSyntaxError
from rlhfless_operator.convert.shell.values import HOME, Unknowns

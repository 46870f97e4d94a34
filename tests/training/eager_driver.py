"""`rlhfless run` whose actors are let go as soon as all of their samples wait, however long a start takes here.

python -m tests.training.eager_driver JOB.yaml
"""

import sys

from rlhfless_operator.cli import main
from rlhfless_operator.training.instances.away import LettingActorsGo

if __name__ == "__main__":
    LettingActorsGo._pays = property(lambda choice: True)  # type: ignore[assignment,method-assign]
    LettingActorsGo._patience = property(lambda choice: 0.05)  # type: ignore[assignment,method-assign]
    sys.argv[1:] = ["run", sys.argv[1], "--threads", "1"]
    main()

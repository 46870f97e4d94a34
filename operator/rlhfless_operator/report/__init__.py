"""Reports about runs: `report.html`, comparisons of runs, and the model card.

- `page`: the report. `run`: read a run for it. `charts`: its charts.
- `learning`, `planning`, `drafting`, `resources` (with `gantt` and `hindsight`), `data` and `samples`: its sections.
- `compare`: compare runs. `model_card`: the README of a trained model.
"""

from rlhfless_operator.report.compare import compare, write_comparison
from rlhfless_operator.report.model_card import model_card
from rlhfless_operator.report.page import write_report

"""Reports about runs: `report.html`, comparisons of runs, and the model card."""

from rlhfless_operator.report.compare import compare, write_comparison
from rlhfless_operator.report.model_card import model_card
from rlhfless_operator.report.page import write_report

__all__ = ["compare", "model_card", "write_comparison", "write_report"]

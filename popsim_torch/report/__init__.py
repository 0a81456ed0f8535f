"""Reports of programs: what they would cost on an IPU, as files, a page and text.

``Options.enableProfiling`` writes them; ``popsim_torch.report.open(folder)`` reads one.
"""

from popsim_torch.report.comparison import ComparedFigure, Comparison
from popsim_torch.report.folder import annotate
from popsim_torch.report.insights import Insight
from popsim_torch.report.modules import ModuleCost, OpCost, PhaseCost
from popsim_torch.report.reading import open_report as open
from popsim_torch.report.report import IpuMemory, RecordedRun, Report

__all__ = [
    "ComparedFigure",
    "Comparison",
    "Insight",
    "IpuMemory",
    "ModuleCost",
    "OpCost",
    "PhaseCost",
    "RecordedRun",
    "Report",
    "annotate",
    "open",
]

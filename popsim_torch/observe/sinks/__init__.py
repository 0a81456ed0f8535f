"""Sinks: where the statistics of a run go. Files, TensorBoard, the terminal, pictures, a page."""

from popsim_torch.observe.sinks.alarms import Alarm, AlarmFinder, find_alarms
from popsim_torch.observe.sinks.html_page import HtmlPage, write_page
from popsim_torch.observe.sinks.live import LiveTerminal
from popsim_torch.observe.sinks.pictures import gradient_flow, histogram_over_time, nan_map
from popsim_torch.observe.sinks.safe import SafeSink
from popsim_torch.observe.sinks.summary_board import SummaryBoard
from popsim_torch.observe.sinks.summary_file import SummaryFile

__all__ = [
    "Alarm",
    "AlarmFinder",
    "HtmlPage",
    "LiveTerminal",
    "SafeSink",
    "SummaryBoard",
    "SummaryFile",
    "find_alarms",
    "gradient_flow",
    "histogram_over_time",
    "nan_map",
    "write_page",
]

"""Pages and plots shared by every verb that reports. Imports no torch and nothing else of the package.

page = Page(title="...", sections=[Plots(title="Loss", plots=[Plot(...)]), Table(...)])
write_page(page, "report.html")
"""

from perilune.report.page import Headline, Notes, Page, Plots, Sample, Samples, Section, Table, render_page, write_page
from perilune.report.plots import Plot, Series, Threshold, render_svg, save_png, series_from_records, smoothed
from perilune.report.training import ReportError, write_training_report

__all__ = [
    "Headline",
    "Notes",
    "Page",
    "Plot",
    "Plots",
    "ReportError",
    "Sample",
    "Samples",
    "Section",
    "Series",
    "Table",
    "Threshold",
    "render_page",
    "render_svg",
    "save_png",
    "series_from_records",
    "smoothed",
    "write_page",
    "write_training_report",
]

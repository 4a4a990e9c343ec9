"""The kit for pages: numbers in pandas, charts in Altair, one HTML file that loads nothing.

A page is made of sections, and a section of figures, tables and sentences:

    import pandas as pd
    from bapo_openrlhf.workbench.pages import charts
    from bapo_openrlhf.workbench.pages.curves import Curve, Key
    from bapo_openrlhf.workbench.pages.colours import PALETTE
    from bapo_openrlhf.workbench.pages.figure import Figure
    from bapo_openrlhf.workbench.pages.page import Section, render
    from bapo_openrlhf.workbench.pages.table import Table

    curve = Curve(Key("first run", PALETTE[0]), pd.Series({1: 0.2, 2: 0.3, 3: 0.5}))
    chart = charts.lines([curve], x=charts.STEP, y="mean reward", x_domain=(1, 3))
    reward = Figure("Reward", "Mean reward of the fresh responses.").with_curves([curve], chart, charts.STEP)
    seconds = Table.of(["phase", "seconds"], [["generation", 12.5], ["training", 30]])
    sections = [Section("reward", "Reward", figures=[reward], tables=[seconds])]
    html = render(["first run"], sections, command="report")

`figure.save_png` writes a chart to a PNG file, and `Table.markdown` gives a table for a README. `text` and `colours`
import neither pandas nor Altair, so that commands that only print may use them.
"""

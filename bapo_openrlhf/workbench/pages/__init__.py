"""The kit for pages: numbers in pandas, charts in Altair, one HTML file that loads nothing.

A page is made of sections (`page.render`), and a section of figures, tables and sentences. `figure.save_png` writes a
chart to a PNG file, and `Table.markdown` gives a table for a README. `text` and `colours` import neither pandas nor
Altair, so that commands that only print may use them.
"""

"""The kit for pages: numbers in pandas, charts in Altair, one HTML file that loads nothing.

`text` and `colours` import neither pandas nor Altair, so that commands that only print may use them.
"""

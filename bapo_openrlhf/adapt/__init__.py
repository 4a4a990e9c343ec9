"""The batch adaptation layer: groups in, a batch out.

Pure: numpy and the standard library only. No Ray, no torch, no files, no clock, no global random state.
"""

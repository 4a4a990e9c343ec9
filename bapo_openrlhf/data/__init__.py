"""Data: read rows as a run reads them, and find what is wrong with them before a model loads."""

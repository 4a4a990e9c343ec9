"""Before a run: its flags checked, its checkpoint chosen, and OpenRLHF's `train` started. No model loads here."""

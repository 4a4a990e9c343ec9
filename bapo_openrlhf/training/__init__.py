"""Inside a run: OpenRLHF's classes extended with batch adaptation. Nothing of OpenRLHF is copied here."""

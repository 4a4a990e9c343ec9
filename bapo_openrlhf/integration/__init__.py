"""OpenRLHF's joints: where batch adaptation is put into its trainer. Nothing of OpenRLHF is copied here."""

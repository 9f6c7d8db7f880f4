"""The command `torchrec-bls`."""

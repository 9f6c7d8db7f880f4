"""Measures this machine: `torchrec-bls calibrate`."""

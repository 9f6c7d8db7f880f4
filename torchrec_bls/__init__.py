"""Bounded-lag one-sided embedding all-to-alls for TorchRec."""

from torchrec_bls._versions import check_native, check_packages

# Before any other import: a pair that doesn't match would fail there with an undefined symbol.
check_packages()
check_native()

"""TorchRec's sharded embedding modules with bounded-lag exchanges."""

from torchrec_bls._versions import check_packages

# Before any import of torchrec, which fails with an undefined symbol where a pair does not match.
check_packages()

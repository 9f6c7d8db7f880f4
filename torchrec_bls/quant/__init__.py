"""TorchRec's quantized embedding modules, sharded over processes."""

from torchrec_bls._contract import check_torchrec

# Before any import of torchrec, which fails with an undefined symbol where versions do not match.
check_torchrec()

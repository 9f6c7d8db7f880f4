"""DLRM inference in plain PyTorch with bounded lag: Listing 2 of the BLS paper."""

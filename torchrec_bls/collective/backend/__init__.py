"""The torch.distributed backend "bls"."""

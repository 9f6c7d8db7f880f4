"""Planned buckets of dense gradients beside those of DistributedDataParallel and TorchRec."""

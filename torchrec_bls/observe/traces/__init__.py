"""Traces of torch.profiler from all ranks, joined to one job with one clock."""

"""Traces of torch.profiler from all ranks, as one job by one clock."""

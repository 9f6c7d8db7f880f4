"""What all benchmarks share: records, statistics, pages."""

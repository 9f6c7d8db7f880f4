"""Tables in shared memory, which every rank of a host reads where they lie (docs/design/direct-reads.md)."""

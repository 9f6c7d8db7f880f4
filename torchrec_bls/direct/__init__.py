"""Tables in shared memory, which every rank of a host reads where they lie."""

"""Tables in shared memory. Every rank of a host reads them where they lie."""

"""What the doctor reads of a host, and what it finds there."""

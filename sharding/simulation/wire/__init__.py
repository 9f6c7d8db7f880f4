"""What exchanges put on the wire, and how much of it passes."""

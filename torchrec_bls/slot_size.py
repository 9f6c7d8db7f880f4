"""The size of a channel's slots: the runtime makes them, the planner counts them.

This module imports nothing, so that a plan can be made without the runtime.
"""

#: Room for messages larger than the one that a slot's size is derived from.
HEADROOM = 1.5
#: What a slot holds beside a message; the native module's MIN_SLOT_BYTES.
HEADER_BYTES = 256
SMALLEST_SLOT_BYTES = 1 << 14


def wanted_slot_bytes(message_bytes: float) -> int:
    """Returns the bytes of a slot for messages of `message_bytes`, before any lower limit."""
    return int(message_bytes * HEADROOM) + HEADER_BYTES

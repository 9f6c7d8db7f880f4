"""Messages that both sides of a test can make up by themselves."""

MESSAGES = 40
# Of parts: none, around the 64 bytes from which on they stand otherwise, and more than a slot.
SIZES = (0, 1, 63, 64, 65, 200, 700, 5000)


def pattern(source: int, destination: int, sequence: int) -> list[bytes]:
    """Returns the parts of a message, every fourth of which has none."""
    parts = []
    for index in range((sequence + destination) % 4):
        size = SIZES[(3 * sequence + 2 * index + source) % len(SIZES)]
        first = 17 * source + 5 * sequence + index
        parts.append(bytes((first + i) % 251 for i in range(size)))
    return parts

"""Draws how a row travels as codes: from the table of one rank into the output of another."""

from svg import BLUE, GREEN, GREY, ORANGE, Drawing


def drawing() -> Drawing:
    """Returns the picture."""
    picture = Drawing(
        860, 250, "Rows are looked up, each distinct one is encoded, and a frame goes into the slot"
    )
    picture.frame(8, 10, 484, 190, "rank that has the table")
    picture.frame(640, 10, 212, 190, "rank that asked")
    for x, y, width, text, fill in (
        (22, 44, 130, "look up\nrows, float32", BLUE),
        (186, 44, 136, "each row once\nunique=True", BLUE),
        (356, 44, 122, "encode\nuint4, bound, ...", BLUE),
        (520, 44, 92, "frame\nin the slot", ORANGE),
        (654, 44, 184, "decode\ninto the output's columns", GREEN),
        (22, 126, 130, "256 bytes\na row", GREY),
        (186, 126, 136, "256 bytes\nfewer rows", GREY),
        (356, 126, 256, "40 bytes by uint4\n8 of head, 32 of codes", GREY),
        (654, 126, 184, "256 bytes\na row again", GREY),
    ):
        picture.box(x, y, width, 58, text, fill)
    for start, end in ((152, 183), (322, 353), (478, 517), (612, 651)):
        picture.arrow((start, 73), (end, 73))
    picture.label(
        430, 226, "A frame has a checksum. Its sizes are compared with the plan and never believed."
    )
    return picture


if __name__ == "__main__":
    drawing().save(__file__)

"""Draws the life of a slot, from the post of a message to the next post into the same place."""

from svg import BLUE, GREEN, GREY, ORANGE, Drawing

LANES = {"sender": 34, "slot": 124, "receiver": 214}
HEIGHT = 56


def drawing() -> Drawing:
    """Returns the picture."""
    picture = Drawing(
        860, 300, "A slot is free, written, arrived, read, and free again once it is released"
    )
    for name, y in LANES.items():
        picture.label(62, y + HEIGHT // 2, name, "end")
    for x, width, text, lane, fill in (
        (76, 132, "1 look\nis the slot free?", "sender", BLUE),
        (224, 132, "2 write\nheader, payload", "sender", BLUE),
        (372, 132, "3 arrive\nnumber n + 1", "sender", BLUE),
        (690, 140, "next post\nn + 2(k + 1)", "sender", BLUE),
        (76, 132, "free", "slot", GREY),
        (224, 132, "being written", "slot", ORANGE),
        (372, 132, "arrived", "slot", GREEN),
        (520, 132, "being read", "slot", GREEN),
        (668, 168, "free", "slot", GREY),
        (224, 280, "4 wait\nfor the number n + 1", "receiver", BLUE),
        (520, 132, "5 read\nin place", "receiver", BLUE),
        (668, 132, "6 release", "receiver", BLUE),
    ):
        picture.box(x, LANES[lane], width, HEIGHT, text, fill)
    picture.arrow((290, 92), (290, 121))
    picture.arrow((438, 92), (438, 121))
    picture.arrow((438, 182), (438, 211))
    picture.arrow((586, 182), (586, 211))
    picture.arrow((734, 213), (734, 184))
    picture.arrow((802, 242), (852, 242), (852, 62), (833, 62))
    picture.label(852, 287, "the credit travels with the receiver's next message", "end")
    return picture


if __name__ == "__main__":
    drawing().save(__file__)

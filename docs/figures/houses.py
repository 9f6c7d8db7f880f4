"""Draws the houses of the code: what stands on what."""

from svg import BLUE, GREEN, ORANGE, PURPLE, Drawing


def drawing() -> Drawing:
    """Returns the picture."""
    picture = Drawing(
        860, 470, "Your program uses torchrec_bls, which stands on csrc; the planner stands beside"
    )
    for x, width, text in (
        (10, 176, "your program"),
        (196, 176, "torchrec-bls ..."),
        (382, 176, "torchrun"),
        (600, 250, "TorchRec's planner API"),
    ):
        picture.box(x, 8, width, 34, text, PURPLE)
    for x in (98, 284, 470, 725):
        picture.arrow((x, 42), (x, 66))
    picture.frame(10, 70, 548, 210, "torchrec_bls: Python")
    for x, y, width, text in (
        (
            24,
            100,
            350,
            "cli, serve, launch, doctor, observe\ncommands, an endpoint, hosts, who waits",
        ),
        (384, 100, 160, "overlap\ndense gradients"),
        (24, 160, 170, "pipeline, direct, quant\nrequests in, answers out"),
        (204, 160, 340, "distributed\nTorchRec's sharded modules"),
        (24, 220, 350, "collective\nthe channel, and the backend bls"),
        (384, 220, 160, "codecs, analysis\nfewer bytes"),
    ):
        picture.box(x, y, width, 50, text, BLUE)
    picture.frame(600, 70, 250, 210, "sharding: the planner")
    for y, text in (
        (100, "torchrec, report\nplans, and why"),
        (160, "search, simulation\nwhich plan, which bound"),
        (220, "costs, reuse, calibration\nwhat it takes here"),
    ):
        picture.box(614, y, 222, 50, text, GREEN)
    picture.arrow((284, 280), (284, 314))
    picture.label(296, 298, "_native", "start")
    picture.frame(10, 318, 548, 142, "csrc: C++")
    for x, y, width, text in (
        (24, 346, 125, "lookup\nrows, and sums"),
        (157, 346, 125, "messages\nwhat is sent"),
        (290, 346, 125, "channel\nslots, waiting"),
        (423, 346, 121, "codecs\nrows as codes"),
        (24, 402, 520, "transport\nshared memory, RDMA, TCP"),
    ):
        picture.box(x, y, width, 48, text, ORANGE)
    picture.arrow((558, 125), (600, 125))
    picture.arrow((600, 245), (558, 245))
    picture.label(725, 308, "It runs where no rank does. Its calibration\nmeasures the runtime.")
    return picture


if __name__ == "__main__":
    drawing().save(__file__)

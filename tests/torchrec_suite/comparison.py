"""What an example's outcomes with both kinds of sharders say."""

import re
from typing import NamedTuple

# Texts of refusals, and the page that documents each.
REFUSALS = {
    r"only rows of FP32 can be encoded": "docs/design/codecs.md",
    r"ids can't be deduplicated": "docs/design/torchrec-seam.md",
    r"the shards would be on the device": "docs/guide.md",
    r"is planned with (compute kernel|sharding type)": "docs/design/torchrec-seam.md",
    r"there is no codec": "docs/design/codecs.md",
    r"register_backward_hook: no grad-requiring tensor": "docs/design/torchrec-seam.md",
}


class Verdict(NamedTuple):
    """How an example ended with TorchRec's sharders and with ours.

    Attributes:
        kind: "both pass"; "better", where only ours passes; "refused", where ours raises what a
            page documents; "worse", where only TorchRec's passes; "both fail"; "skipped".
        text: outcome with our sharders.
        page: page that documents the refusal, or "".
    """

    kind: str
    text: str
    page: str = ""


def compare(control: dict[str, str], ours: dict[str, str]) -> dict[str, Verdict]:
    """Returns the verdict of each example that one of two runs had, by its name."""
    return {
        name: _verdict(control.get(name, "not run"), ours.get(name, "not run"))
        for name in dict.fromkeys([*control, *ours])
    }


def _verdict(control: str, ours: str) -> Verdict:
    text = ours.partition("\n")[0]
    if "skipped" in (control, ours) and control == ours:
        return Verdict("skipped", text)
    if ours == "passed":
        return Verdict("both pass" if control == "passed" else "better", text)
    for refusal, page in REFUSALS.items():
        if re.search(refusal, ours):
            return Verdict("refused", text, page)
    return Verdict("worse" if control == "passed" else "both fail", text)

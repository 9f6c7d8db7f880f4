"""Plays one rank with pyverbs, without torch and the package: `python play_peer.py JSON`.

It writes a line of JSON for each phase of the meeting and reads one with the records of all ranks.
The last line that it writes says what became of it.
"""

import json
import sys
from typing import Any

from patterns import MESSAGES, pattern
from wire_peer import Poisoned, WireError, WirePeer


def exchange(peer: WirePeer, messages: int) -> None:
    """Exchanges messages as far ahead as the bound allows."""
    for sequence in range(messages + peer.bound):
        if sequence < messages:
            peer.send({rank: pattern(peer.rank, rank, sequence) for rank in peer.peers})
        if sequence >= peer.bound:
            for rank, parts in peer.receive().items():
                if parts != pattern(rank, peer.rank, sequence - peer.bound):
                    raise WireError(f"message {sequence - peer.bound} of rank {rank} is wrong")
            peer.release()


def meet(phase: str, record: dict[str, Any]) -> Any:
    print(json.dumps({"phase": phase, "record": record}), flush=True)
    return json.loads(sys.stdin.readline())


def play(scene: str, damage: dict[str, int], **arguments: Any) -> str:
    """Returns what became of this rank."""
    peer = WirePeer(**arguments)
    peer.connect(meet("RDMA memory", peer.record()))
    meet("RDMA connected", {})
    try:
        if scene == "exchange":
            exchange(peer, MESSAGES)
            peer.close()
            return "closed"
        exchange(peer, 5)
        if scene == "close":
            peer.close()
            return "closed"
        if scene == "poison":
            peer.spread_poison("the peer fell over äöü")
            peer.close()
            return "poisoned the others"
        # "damage" sends one bad message, "read" sends none; then it hears how the others end.
        if scene == "damage":
            peer.send({rank: pattern(peer.rank, rank, 5) for rank in peer.peers}, **damage)
        for _ in range(MESSAGES):
            peer.receive()
            peer.release()
    except (Poisoned, WireError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing happened"


if __name__ == "__main__":
    print(json.dumps({"end": play(**json.loads(sys.argv[1]))}), flush=True)

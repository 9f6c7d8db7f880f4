"""The tasks of messages on the links of their hosts."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from ..engine.task_graph import After, GraphBuilder, Tasks
from .link import Link

Floats = npt.NDArray[np.float64]

# A burst is at most a part of it late.
_BURST_PARTS = 4
_ROUNDING = 1e-6


class LinkTasks:
    """Adds the tasks of all ranks' messages, in the order in which they are sent.

    Args:
        builder: builder of the graph.
        link: link of the ranks' hosts.
        threads: (ranks,), thread of each rank's bytes on the link.
    """

    def __init__(self, builder: GraphBuilder, link: Link, threads: Tasks) -> None:
        self._builder, self._link, self._threads = builder, link, threads
        self._ranks = np.arange(len(threads))
        # Of links with a burst, for each part of the bytes: time of all so far, and its tasks.
        self._parts: deque[tuple[Floats, Tasks]] = deque()
        if link.burst_bytes:
            begins = builder.add("link begins", threads)
            self._parts.append((np.zeros(len(threads)), begins))

    def send(self, name: str, written: Tasks, transfer: Floats, step: int) -> list[Tasks]:
        """Adds the tasks that send messages. Returns those after which they have passed the link.

        A burst passes at once if all bytes but a burst have had their time on the link.

        Args:
            name: name of the exchange.
            written: (ranks,), tasks that have written the messages.
            transfer: (ranks,), microseconds that each rank's messages take on its link.
            step: step of the job.
        """
        if not self._link.burst_bytes:
            return [self._pass(name, transfer, [After(written)], step)]
        burst = self._link.burst_us(transfer)
        at_once = np.minimum(transfer, burst)
        after = [After(written)]
        for part in (transfer - at_once, *[at_once / _BURST_PARTS] * _BURST_PARTS):
            passed = self._pass(name, part, after, step)
            after = []
            self._parts.append((self._parts[-1][0] + part, passed))
        due = self._parts[-1][0] - burst
        while len(self._parts) > 1 and (self._parts[1][0] <= due).all():
            self._parts.popleft()
        reached = np.array([total >= due - _ROUNDING for total, _ in self._parts])
        tasks = np.array([tasks for _, tasks in self._parts])
        return [written, tasks[reached.argmax(axis=0), self._ranks]]

    def _pass(self, name: str, transfer: Floats, after: list[After], step: int) -> Tasks:
        return self._builder.add(
            f"{name} on the link", self._threads, transfer, after=after, step=step
        )

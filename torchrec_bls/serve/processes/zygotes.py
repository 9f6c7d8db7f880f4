"""The zygote of a service, and its successors."""

import logging

from torchrec_bls.serve.channel import Attach, Channel, Failed, Ready
from torchrec_bls.serve.processes.pause import Pause
from torchrec_bls.serve.processes.plan import Plan
from torchrec_bls.serve.processes.zygote_process import ZygoteProcess

_log = logging.getLogger(__name__)


class Zygotes:
    """Has a zygote that can be forked, and another one when it ends or is outdated.

    Args:
        plan: what they make.

    Attributes:
        age: how many times workers have been outdated by a new zygote.
    """

    def __init__(self, plan: Plan) -> None:
        self.age = 0
        self._plan = plan
        self._pause = Pause()
        self._ready: ZygoteProcess | None = None
        self._making: ZygoteProcess | None = ZygoteProcess(plan, beside=False)
        self._is_attached = self._is_renewing = self._has_been_ready = False

    def __enter__(self) -> "Zygotes":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fork(self, name: str) -> Channel | None:
        """Makes a worker, see `ZygoteProcess.fork`. Returns None if there is no zygote now."""
        return None if self._ready is None else self._ready.fork(name)

    def renew(self) -> None:
        """Begins another zygote, which outdates all workers once it is ready."""
        if self._making is not None:
            self._making.close()
        self._make()
        self._is_renewing = True

    def look(self, now: float, has_tables: bool) -> None:
        """Takes what they say, and begins another one if there is none.

        Args:
            now: this moment.
            has_tables: whether tables can be attached to.

        Raises:
            RuntimeError: the first one has failed.
        """
        if self._ready is not None and None in self._ready.channel.received():
            _log.warning(
                "the process that becomes workers %s: another one is made; requests are answered "
                "meanwhile",
                self._ready.how_it_ended(),
            )
            self._pause.ended(self._ready.began, now)
            self._ready.close()
            self._ready = None
        if self._making is None:
            if self._ready is None and now >= self._pause.until:
                self._make()
            return
        if has_tables and not self._is_attached:
            self._is_attached = self._making.channel.send(Attach())
        for message in self._making.channel.received():
            if isinstance(message, Ready):
                self._take_over()
            elif isinstance(message, Failed):
                self._fail(message.text, now)
            else:
                self._fail(f"the process that makes the model {self._making.how_it_ended()}", now)

    def close(self) -> None:
        """Ends them. Workers go on."""
        for each in (self._ready, self._making):
            if each is not None:
                each.close()

    def _make(self) -> None:
        self._is_attached = False
        self._making = ZygoteProcess(self._plan, beside=self._has_been_ready)

    def _take_over(self) -> None:
        before, self._ready, self._making = self._ready, self._making, None
        if before is not None:
            before.close()
        self._has_been_ready = True
        if self._is_renewing:
            self._is_renewing = False
            self.age += 1

    def _fail(self, text: str, now: float) -> None:
        if not self._has_been_ready:
            raise RuntimeError(text)
        made, self._making = self._making, None
        assert made is not None
        pause = self._pause.ended(made.began, now)
        made.close()
        if self._is_renewing:
            self._is_renewing = False
            _log.error("workers are not replaced, and go on as they are: %s", text)
        else:
            _log.error("no worker can be made, which is tried again in %.1f s: %s", pause, text)

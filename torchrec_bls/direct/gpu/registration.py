"""Host memory that a GPU reads: registered with its driver, and unregistered before it is unmapped.

Tables are sealed, and mapped shared and read-only. Such memory registers if the driver knows the
flag for it. A private mapping registers as well, but the driver would copy all of its pages
(docs/design/gpu-reads.md).
"""

import os
from collections.abc import Callable, Iterator, Sequence

from torchrec_bls.direct.gpu.cuda import (
    NOT_REGISTERED,
    READ_ONLY,
    READ_ONLY_SUPPORTED,
    SAME_ADDRESSES,
    Cuda,
    Event,
)
from torchrec_bls.errors import BLSError
from torchrec_bls.lifetime import When, at_exit

#: Bytes that are registered by one call. The driver refuses calls of 512 GiB; smaller ones take no
#: longer in all, and others of the process have their turn between them.
PIECE_BYTES = 8 << 30

_CURE = 'Look up on the CPU instead: shard the model with BLSConfig(lookup="exchange")'

# Mappings that may still be registered. They stay to the end of the process.
_kept: list[object] = []
_process_ends = False


class RegistrationError(BLSError):
    """The driver did not register host memory for the GPU, or did not let go of it. The text says
    what to do."""


class Registration:
    """Host memory that a GPU reads, at the host's addresses. It stays mapped until it is closed.

    A forked child has nothing registered: there it only lets go of the mapping.

    Args:
        cuda: runtime of the GPU.
        ranges: address and number of bytes of whole pages, a range for each part of a mapping that
            has a file of its own.
        mapping: what keeps all of them mapped.
        mark: function that returns an event behind all reads that were launched by then.

    Raises:
        RegistrationError: the GPU or its driver can't read such memory, or has no room to map it.
            Nothing stays registered.
    """

    def __init__(
        self,
        cuda: Cuda,
        ranges: Sequence[tuple[int, int]],
        mapping: object,
        mark: Callable[[], Event],
    ) -> None:
        self._cuda = cuda
        self._mapping: object = mapping
        self._process = os.getpid()
        self._mark = mark
        # Addresses of what is registered, or was about to be when a call was interrupted.
        self._pieces: list[int] = []
        whole = sum(size for _, size in ranges)
        self._check_able(whole)
        done = 0
        try:
            for address, size in _cut(ranges):
                self._register(address, size, done, whole)
                done += size
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unregisters the memory when the GPU has read it, and lets go of the mapping. It may be
        called again, also if it was interrupted.

        Raises:
            RegistrationError: CUDA does not unregister it. The mapping stays to the end of the
                process, since the GPU may still read it.
            RuntimeError: CUDA has failed before; the mapping stays as well.
        """
        is_own = os.getpid() == self._process
        try:
            if self._pieces and is_own and not _process_ends:
                self._unregister_all()
        except Exception:
            self._keep_mapping()
            raise
        if self._pieces and is_own:
            self._keep_mapping()
        self._pieces.clear()
        self._mapping = None

    def __del__(self) -> None:
        if getattr(self, "_pieces", None):  # one that was never made has no list
            self.close()

    def _keep_mapping(self) -> None:
        _kept.append(self._mapping)
        self._pieces.clear()

    def _check_able(self, size: int) -> None:
        lacking = ""
        if not self._cuda.attribute(READ_ONLY_SUPPORTED):
            lacking = "registers no memory that is mapped read-only, as tables are"
        elif not self._cuda.attribute(SAME_ADDRESSES):
            lacking = "has other addresses for host memory than the host"
        if lacking:
            raise RegistrationError(
                f"the GPU can't read {_gib(size)} of host tables: it {lacking} (driver of CUDA "
                f"{self._cuda.driver()}). {_CURE}"
            )

    def _register(self, address: int, size: int, done: int, whole: int) -> None:
        self._pieces.append(address)
        code = self._cuda.register(address, size, READ_ONLY)
        if code == 0:
            return
        self._pieces.pop()
        self._cuda.forget_error()
        raise RegistrationError(
            f"the driver of CUDA {self._cuda.driver()} did not register {_gib(whole)} of host "
            f"tables for the GPU: cudaHostRegister returned {code} "
            f"({self._cuda.error_name(code)}) for the {size} bytes behind the first {done}. "
            f"{_CURE}"
        )

    def _unregister_all(self) -> None:
        # Whoever read it launched before: nobody notes each launch, which a signal could prevent.
        self._mark().synchronize()
        failed: RegistrationError | None = None
        while self._pieces:
            try:
                self._unregister(self._pieces[-1])
            except RegistrationError as error:
                failed = error
            self._pieces.pop()
        if failed is not None:
            raise failed

    def _unregister(self, address: int) -> None:
        for _ in range(2):  # one failure leaves nothing behind
            code = self._cuda.unregister(address)
            if code == 0:
                return
            self._cuda.forget_error()
            if code == NOT_REGISTERED:  # the call that was to register it was interrupted
                return
        raise RegistrationError(
            f"the driver of CUDA {self._cuda.driver()} did not unregister host tables: "
            f"cudaHostUnregister returned {code} ({self._cuda.error_name(code)}). They stay in "
            "memory to the end of this process: restart it"
        )


@at_exit(When.FOLLOWERS)
def _leave_all() -> None:
    """What is registered stays so: the process ends, and CUDA may be gone before the mappings."""
    global _process_ends
    _process_ends = True


def _cut(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for address, size in ranges:
        for done in range(0, size, PIECE_BYTES):
            yield address + done, min(PIECE_BYTES, size - done)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"

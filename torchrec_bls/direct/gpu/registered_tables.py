"""The tables of one version, mapped for a GPU and registered with it."""

from collections.abc import Sequence

from torchrec_bls import _native
from torchrec_bls.direct.gpu.device import Gpu
from torchrec_bls.direct.gpu.registration import Registration


class RegisteredTables:
    """Tables that a GPU reads where they lie in the host's memory.

    They are mapped once more: the window of CPU lookups is private, and the driver would copy its
    pages.

    Args:
        gpu: the GPU.
        pages: pages of the tables, in the order of a window.

    Attributes:
        window: the mapping.
        registration: the registration. It ends with this object, behind the last read.
        address: address of the first byte, for the host and the GPU.

    Raises:
        RegistrationError: the GPU can't read them.
        BLSError: they can't be mapped.
    """

    def __init__(self, gpu: Gpu, pages: Sequence[tuple[_native.TableSegment, int, int]]) -> None:
        self.window = _native.TableWindow(pages, shared=True)
        ranges = []
        at = self.address = self.window.address
        for _, _, size in pages:
            ranges.append((at, size))
            at += size
        self.registration = Registration(gpu.cuda, ranges, self.window, gpu.mark)

"""The pure parts of how the guest's kernel is made ready; nothing here boots or downloads."""

import lzma
from pathlib import Path

import pytest

from tests.verbs.guest.kernel import elf_of, load_order, package_of

SETUP = bytes(16 << 10)


def test_package_is_what_the_metapackage_depends_on() -> None:
    printed = "linux-image-amd64\n  Depends: linux-image-6.1.0-56-amd64\n  Suggests: linux-doc\n"
    assert package_of(printed) == "linux-image-6.1.0-56-amd64"


@pytest.mark.parametrize("printed", ["", "linux-image-amd64\n", "x\n  Depends: linux-image-rt\n"])
def test_without_a_kernel_apt_is_named(printed: str) -> None:
    with pytest.raises(RuntimeError, match="apt-get update"):
        package_of(printed)


def test_modules_are_loaded_after_what_they_need_and_once() -> None:
    printed = [
        "builtin virtio\ninsmod /m/net/9pnet.ko \ninsmod /m/fs/9p.ko \n",
        "insmod /m/net/9pnet.ko \ninsmod /m/net/dummy.ko.xz numdummies=0\n",
    ]
    expected = ["/m/net/9pnet.ko", "/m/fs/9p.ko", "/m/net/dummy.ko.xz"]
    assert load_order(printed) == [Path(module) for module in expected]


def test_elf_is_found_behind_the_setup_code() -> None:
    elf = b"\x7fELF" + bytes(range(256)) * 100
    # The magic number of xz in the setup code means nothing, nor does what follows the stream.
    setup = b"\xfd7zXZ\0".ljust(len(SETUP), b"\0")
    assert elf_of(setup + b"code" + lzma.compress(elf) + b"more") == elf


def test_image_that_xz_did_not_compress_is_left_as_it_is() -> None:
    assert elf_of(SETUP + b"zstd") == SETUP + b"zstd"


def test_stream_without_an_elf_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no ELF"):
        elf_of(SETUP + lzma.compress(b"something else"))

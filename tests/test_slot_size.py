"""The planner counts the bytes of slots as the runtime makes them."""

from torchrec_bls import _native, slot_size


def test_a_slot_holds_the_header_of_the_native_module() -> None:
    assert _native.MIN_SLOT_BYTES == slot_size.HEADER_BYTES

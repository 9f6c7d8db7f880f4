"""The compiled core. Addresses are integers (``Tensor.data_ptr()``), sizes are bytes."""

from collections.abc import Sequence

WIRE_VERSION: int
MIN_SLOT_BYTES: int
MAX_PARTS: int
WITH_VERBS: bool

Address = tuple[int, int, int, int, int]
VerbsAddress = tuple[list[int], int, int, int, int, int, int, list[int], list[int]]
Block = tuple[int, int, int, int]
Items = tuple[int, int]
Group = tuple[int, int, int, int]

Matrix = tuple[int, int, int, int]

def usual_encoded_bytes(codec: int, rows: int, columns: int) -> int: ...
def max_encoded_bytes(codec: int, rows: int, columns: int) -> int: ...
def encode_rows(codec: int, rows: Matrix, out: int) -> int: ...
def decode_rows(codec: int, data: int, bytes: int, rows: Matrix) -> None: ...
def instruction_sets() -> list[str]: ...
def use_instruction_set(name: str) -> None: ...

class Transport: ...

class ShmTransport(Transport):
    def __init__(self, rank: int, world_size: int, slots: int, slot_bytes: int) -> None: ...
    @property
    def address(self) -> Address: ...
    def connect(self, addresses: Sequence[Address]) -> None: ...
    def seal(self) -> None: ...

class VerbsConfig:
    device: str
    port: int
    gid_index: int
    mtu: int
    traffic_class: int
    service_level: int
    timeout: int
    retry_count: int
    rnr_retry: int
    min_rnr_timer: int
    inline_bytes: int

class VerbsTransport(Transport):
    def __init__(
        self,
        config: VerbsConfig,
        rank: int,
        world_size: int,
        slots: int,
        slot_bytes: int,
        deadline_seconds: float,
        peers: Sequence[int],
    ) -> None: ...
    @property
    def address(self) -> VerbsAddress: ...
    @property
    def device(self) -> str: ...
    @property
    def link(self) -> str: ...
    def connect(self, addresses: Sequence[VerbsAddress]) -> None: ...

def port_limits(device: str, port: int) -> tuple[int, int]: ...

class MixedTransport(Transport):
    def __init__(
        self,
        shm: ShmTransport,
        verbs: VerbsTransport,
        local_ranks: Sequence[int],
        world_size: int,
    ) -> None: ...

class ChannelStats:
    @property
    def messages(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def pulled_messages(self) -> int: ...
    @property
    def largest_message(self) -> int: ...
    @property
    def wait_seconds(self) -> list[float]: ...
    @property
    def lag_histogram(self) -> list[int]: ...

class Arrival:
    @property
    def sequence(self) -> int: ...
    def part_count(self, source: int) -> int: ...
    def view(self, source: int, index: int) -> memoryview: ...

class Channel:
    def __init__(
        self,
        transport: Transport,
        rank: int,
        world_size: int,
        bound: int,
        slots: int,
        deadline_seconds: float,
        name: str,
    ) -> None: ...
    def post(self, messages: Sequence[Sequence[Sequence[Block]]]) -> int: ...
    def wait(self) -> Arrival: ...
    def release(self) -> None: ...
    def poison(self, reason: str) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...
    def stats(self) -> ChannelStats: ...
    @property
    def pulled_messages(self) -> int: ...
    @property
    def posted(self) -> int: ...
    @property
    def completed(self) -> int: ...
    @property
    def released(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def ring_bytes(self) -> int: ...

class ArrivedIds:
    def __init__(self, arrival: Arrival, features: int, order: Sequence[int]) -> None: ...
    @property
    def length_bytes(self) -> int: ...
    @property
    def value_bytes(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def total_stride(self) -> int: ...
    @property
    def total_values(self) -> int: ...
    @property
    def strides(self) -> list[int]: ...
    @property
    def values_per_source(self) -> list[int]: ...
    @property
    def counts(self) -> list[int]: ...
    def assemble(self, lengths: int, values: int, weights: int) -> None: ...

def post_ids(
    channel: Channel,
    lengths: Items,
    values: Items,
    weights: Items,
    features: int,
    stride: int,
    count: int,
    features_per_rank: Sequence[int],
    order: Sequence[int],
) -> list[int]: ...
def check_ids(
    lengths: Items, values: Items, stride: int, count: int, rows: Sequence[int]
) -> tuple[list[int], tuple[int, int, int] | None]: ...
def post_grouped_rows(
    channel: Channel,
    data: int,
    row_bytes: int,
    counts: Sequence[int],
    order: Sequence[int],
    to_self: bool,
) -> None: ...
def post_table_rows(
    channel: Channel,
    tables: Sequence[tuple[int, int, int]],
    ids: Items,
    count: int,
    row_bytes: int,
    counts: Sequence[int],
    order: Sequence[int],
    own: int,
) -> None: ...
def post_pooled_rows(
    channel: Channel,
    tables: Sequence[tuple[int, int, int]],
    ids: Items,
    count: int,
    lengths: Items,
    length_count: int,
    batches: Sequence[int],
    order: Sequence[int],
) -> None: ...
def collect_grouped_rows(
    arrival: Arrival, out: int, row_bytes: int, counts: Sequence[int], order: Sequence[int]
) -> None: ...
def collect_rows(
    arrival: Arrival,
    out: int,
    row_bytes: int,
    rows_per_source: Sequence[int],
    permutation: Items,
    rank: int,
    own_rows: int,
    counts: Sequence[int],
    order: Sequence[int],
) -> None: ...
def collect_columns(
    arrival: Arrival, out: int, rows: int, out_row_bytes: int, groups: Sequence[Group]
) -> None: ...

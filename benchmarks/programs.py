"""Which program writes each record of benchmarks/results, and which code it measures."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Program:
    """A benchmark.

    Attributes:
        name: module within `benchmarks`.
        measures: files and folders whose speed or accuracy the record shows, besides the program.
            What only sets up the measurement is not among them.
    """

    name: str
    measures: tuple[str, ...]


_CHANNEL = (
    "csrc/channel",
    "csrc/messages",
    "csrc/transport/shm",
    "csrc/host",
    "torchrec_bls/collective",
)
_MODULES = (*_CHANNEL, "csrc/lookup", "torchrec_bls/distributed")
_DIRECT = ("csrc/lookup", "torchrec_bls/distributed", "torchrec_bls/direct")
_CODECS = ("csrc/codecs", "torchrec_bls/codecs")
_SERVICE = (
    *("csrc/lookup", "torchrec_bls/distributed/inputs", "torchrec_bls/direct"),
    *("torchrec_bls/quant", "torchrec_bls/serve"),
)
_PIPELINE = (
    *("torchrec_bls/pipeline.py", "torchrec_bls/pipeline_claim.py"),
    "torchrec_bls/pipeline_stages.py",
)
_SIMULATOR = (
    *("sharding/simulation", "sharding/costs", "sharding/calibration"),
    "torchrec_bls/rank_steps.py",
)
_BUCKETS = ("torchrec_bls/overlap", "torchrec_bls/collective")

#: By the name of the record's file.
PROGRAMS = {
    "all_reduce": Program("exchange.all_reduce", _CHANNEL),
    "alltoall": Program("exchange.alltoall", _CHANNEL),
    "backend": Program("modules.backend", _CHANNEL),
    "bounded_codec": Program("codecs.bounded", _CODECS),
    "bounded": Program("bounded.study", (*_CODECS, "benchmarks/bounded", "benchmarks/quantized")),
    "codec_exchange": Program("codecs.exchange", (*_CODECS, *_MODULES)),
    "codecs": Program("codecs.rows", _CODECS),
    "delays": Program("delays.delays", (*_MODULES, *_PIPELINE)),
    "direct_faults": Program("direct.faults", _DIRECT),
    "direct_latency": Program("direct.latency", _DIRECT),
    "direct_reads": Program("direct.reads", _DIRECT),
    "direct_switches": Program("direct.switches", _DIRECT),
    "embedding": Program("modules.embedding", _MODULES),
    "late_wait": Program("overlap.late_wait", _MODULES),
    "libra": Program("libra.study", ("benchmarks/libra", "torchrec_bls/overlap")),
    "libra_gpu": Program("libra.gpu", ()),
    "over_tcp": Program("exchange.over_tcp", (*_CHANNEL, "csrc/transport/tcp")),
    "overlap": Program("overlap.backward", _BUCKETS),
    "paper_bls": Program("paper_bls.evaluation", (*_MODULES, *_PIPELINE)),
    "performance-models": Program(
        "planner.study_models", ("sharding/costs", "sharding/calibration")
    ),
    "quantized": Program("quantized.study", ("benchmarks/quantized",)),
    "quantized_modules": Program("modules.quantized", (*_DIRECT, "torchrec_bls/quant")),
    "row_refresh": Program("direct.row_refresh", _DIRECT),
    "service_tables": Program("direct.service_tables", (*_DIRECT, "torchrec_bls/quant")),
    "serving": Program("serve.load", _SERVICE),
    "serving_costs": Program("serve.costs", _SERVICE),
    "serving_deaths": Program("serve.peers.deaths", _SERVICE),
    "serving_fire": Program("serve.fire", _SERVICE),
    "serving_freshness": Program("serve.freshness", (*_SERVICE, "torchrec_bls/delta_writer.py")),
    "serving_peers": Program("serve.peers.compare", (*_SERVICE, "benchmarks/serve/peers")),
    "serving_peers_grid": Program("serve.peers.grid", ("benchmarks/serve/peers",)),
    "serving_refreshes": Program("serve.refresh", _SERVICE),
    "serving_refreshes_int8": Program("serve.refresh", _SERVICE),
    "sharding_search": Program("planner.search", ("sharding/problem", "sharding/search")),
    "simulator": Program("simulator.study", (*_SIMULATOR, "sharding/search", *_MODULES)),
    "simulator_lag": Program("simulator.lag", (*_SIMULATOR, *_CHANNEL)),
    "simulator_links": Program("simulator.links", (*_SIMULATOR, *_CODECS)),
    "simulator_traced": Program("simulator.traced", (*_SIMULATOR, "torchrec_bls/observe/traces")),
    "simulator_transformer": Program(
        "simulator.transformer", (*_SIMULATOR, "benchmarks/simulator/dense")
    ),
    "soak": Program("soak.soak", _CHANNEL),
    "tracking": Program(
        "modules.tracking",
        (*_MODULES, "torchrec_bls/delta_writer.py", "torchrec_bls/lookup_notes.py"),
    ),
}

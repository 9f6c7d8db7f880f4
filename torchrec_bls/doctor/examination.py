"""All examinations of the doctor, in the order of the report."""

import socket
from collections.abc import Sequence
from pathlib import Path

from torchrec_bls.doctor.finding import Finding, Status
from torchrec_bls.doctor.host.cpus import cpus_finding
from torchrec_bls.doctor.host.descriptors import descriptors_finding
from torchrec_bls.doctor.host.devices import find_devices
from torchrec_bls.doctor.host.gpus import gpus_findings
from torchrec_bls.doctor.host.huge_pages import huge_pages_finding
from torchrec_bls.doctor.host.memory import memlock_finding, memory_finding
from torchrec_bls.doctor.host.network import address_of_host_name, interfaces, network_finding
from torchrec_bls.doctor.host.rdma import rdma_findings, why_not_tried
from torchrec_bls.doctor.packages import names_finding, packages_finding
from torchrec_bls.doctor.selftest import TRANSPORTS, gpu_selftest_finding, selftest_finding


def examine(root: Path = Path("/")) -> list[Finding]:
    """Looks at this host and tries its transports."""
    devices = find_devices(root)
    gpus = gpus_findings(root)
    packages = packages_finding()
    findings = [
        packages,
        cpus_finding(root),
        memory_finding(root),
        memlock_finding(root, device=bool(devices)),
        descriptors_finding(root),
        huge_pages_finding(root),
        *gpus,
        *rdma_findings(devices),
        network_finding(socket.gethostname(), address_of_host_name(), interfaces()),
    ]
    if packages.status is Status.PROBLEM:
        text = "not tried: the packages don't fit together, so nothing can be imported"
        return [*findings, Finding("self-test", Status.PROBLEM, text, "See packages, above")]
    findings.insert(1, names_finding())
    tried = [_self_test(transport, findings) for transport in TRANSPORTS]
    if any(each.facts["driver"] is not None for each in gpus):
        tried.append(gpu_selftest_finding())
    return [*findings, *tried]


def _self_test(transport: str, findings: Sequence[Finding]) -> Finding:
    reason = why_not_tried(findings) if transport == "verbs" else ""
    if not reason:
        return selftest_finding(transport)
    facts = {"transport": transport, "seconds": 0.0, "failures": []}
    return Finding(f"{transport} self-test", Status.OK, f"not tried: {reason}", facts=facts)

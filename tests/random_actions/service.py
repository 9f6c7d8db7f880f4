"""Asks a service to which random things happen: python -m tests.random_actions.service.

Two workers behind a front. Processes are killed and stopped, new checkpoints come, some of which
can't be served, code is loaded anew, requests are wrong or slow, descriptors run out, and so does
the room for temporary files, if this is root.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.direct.nodes import until
from tests.serve import ranker
from tests.serve.asking import Refused, Tensor, by_binary, by_grpc, by_json, drawn, json_of
from tests.serve.processes.asked import PATIENT, RENEWAL
from tests.serve.running import Running, descendants, is_alive, running

WAYS = by_json, by_binary, by_grpc
CASES = [drawn(samples, seed) for seed, samples in enumerate((1, 2, 3, 8, 30))]
WORKERS = ["worker 1", "worker 2"]
# Bytes and descriptors by which processes may grow, from a tenth of the actions on: what grows with
# each action grows by more.
_MOST_GROWTH, _MOST_DESCRIPTORS = 64 << 20, 40
# Seconds for which a service at rest uses the same, and bytes by which that may differ.
_AT_REST_S, _STAYS = 2.0, 1 << 20
# Where the service has its temporary files: if this is root, on a disk that is soon full.
SMALL = "small"


class Life:
    """A service and what happens to it.

    Args:
        service: the service.
        folder: where its checkpoints are.
        seed: seed of all that happens.

    Attributes:
        service: see above.
        done: how many actions of each kind.
    """

    def __init__(self, service: Running, folder: Path, seed: int) -> None:
        self.done: Counter[str] = Counter()
        self.service = service
        self._folder = folder
        self._random = random.Random(seed)
        self._version = 1
        self._written: list[Path] = []
        self._actions: dict[Callable[[], None], float] = {
            self.ask: 1000,
            self.ask_wrong: 100,
            self.leave: 20,
            self.be_slow: 5,
            self.look: 20,
            self.refresh: 4,
            self.refresh_without_scores: 1,
            self.refresh_truncated: 1,
            self.kill_worker: 3,
            self.stop_worker: 0.3,
            self.kill_keeper: 1,
            self.kill_zygote: 0.5,
            self.kill_front: 0.5,
            self.renew: 0.3,
            self.renew_in_vain: 0.3,
            self.lack_descriptors: 0.3,
            self.lack_room: 0.3 if (folder / SMALL).is_mount() else 0,
        }

    def act(self) -> None:
        """Does something."""
        [action] = self._random.choices([*self._actions], [*self._actions.values()])
        action()
        self.done[action.__name__] += 1

    def ask(self) -> None:
        case, way = self._random.choice(CASES), self._random.choice(WAYS)
        answer = way(self.service, case.ragged(), parameters=PATIENT)
        version = int(answer.version.partition("@")[0].removeprefix("v"))
        assert version <= self._version
        for name, values in case.scores(version).items():
            worst = abs(answer.outputs[name] - values).max(initial=0.0)
            assert worst < 1e-2 if name == "topics" else worst < 1e-5, (name, worst)

    def ask_wrong(self) -> None:
        case, way = self._random.choice(CASES), self._random.choice(WAYS)
        tensors = case.ragged()
        wrong = self._random.choice(
            [
                tensors[1:],
                [*tensors, tensors[0]],
                [*tensors, Tensor("age", tensors[0].values)],
                [Tensor("dense", tensors[0].values[:, 1:]), *tensors[1:]],
                [each for each in tensors if not each.name.endswith(".lengths")],
            ]
        )
        try:
            way(self.service, wrong, parameters=PATIENT)
        except Refused as refused:
            assert refused.status in (400, "INVALID_ARGUMENT"), refused
        else:
            raise AssertionError("a wrong request was answered")

    def leave(self) -> None:
        """A caller goes away, at any point of its request."""
        body = json.dumps(json_of(self._random.choice(CASES).ragged())).encode()
        head = f"POST {self.service.infer_path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
        whole = head.encode() + body
        with self.service.connect() as connection:
            connection.sendall(whole[: self._random.randrange(len(whole) + 1)])

    def be_slow(self) -> None:
        """A caller sends its request in pieces."""
        body = json.dumps(json_of(self._random.choice(CASES).ragged())).encode()
        head = (
            f"POST {self.service.infer_path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        whole = head.encode() + body
        with self.service.connect() as connection:
            for _ in range(3):
                cut = self._random.randrange(len(whole))
                connection.sendall(whole[:cut])
                whole = whole[cut:]
                time.sleep(0.02)
            connection.sendall(whole)
            with connection.makefile("rb") as answered:
                status = answered.read().split(b" ", 2)[1]
        # The service's own deadline is short.
        assert status in (b"200", b"503", b"504"), status

    def look(self) -> None:
        for path in ("/", "/metrics", "/v2", "/openapi.json", "/v2/health/ready"):
            assert self.service.request("GET", path)[0] == 200, path

    def refresh(self) -> None:
        self._version += 1
        self._write(nan=False)
        until(lambda: self._serves() == self._version)

    def refresh_without_scores(self) -> None:
        self._version += 1
        self._write(nan=True)
        self._is_not_served()

    def refresh_truncated(self) -> None:
        self._version += 1
        path = self._folder / f".{self._version}"
        path.mkdir()
        (path / "weights.pt").write_bytes(b"PK\x03\x04 no more")
        self._written.append(path.rename(self._folder / "new" / f"v{self._version}"))
        # It is no whole checkpoint, which nobody tries.
        self.ask()
        self.refresh()

    def kill_worker(self) -> None:
        self._replace(self._random.choice(WORKERS), signal.SIGKILL)

    def stop_worker(self) -> None:
        self._replace(self._random.choice(WORKERS), signal.SIGSTOP)

    def kill_keeper(self) -> None:
        self._replace("keeper", signal.SIGKILL)

    def kill_zygote(self) -> None:
        self._replace("zygote", signal.SIGKILL)

    def kill_front(self) -> None:
        self._replace("front", signal.SIGKILL)

    def renew(self) -> None:
        before = [self.service.only(each) for each in ("zygote", *WORKERS)]
        self.service.process.send_signal(signal.SIGHUP)
        self._ask_until(lambda: not any(is_alive(each) for each in before) and self._is_whole())

    def renew_in_vain(self) -> None:
        before = self.service.log.count("workers are not replaced")
        (self._folder / "raise").touch()
        self.service.process.send_signal(signal.SIGHUP)
        self._ask_until(lambda: self.service.log.count("workers are not replaced") > before)
        (self._folder / "raise").unlink()

    def lack_descriptors(self) -> None:
        """A worker can accept no connections for a while; those of the front go on."""
        worker = self.service.only(self._random.choice(WORKERS))
        limit = resource.prlimit(worker, resource.RLIMIT_NOFILE)
        resource.prlimit(worker, resource.RLIMIT_NOFILE, (3, limit[1]))
        for _ in range(10):
            self.ask()
        if is_alive(worker):
            resource.prlimit(worker, resource.RLIMIT_NOFILE, limit)
        until(self._is_whole)

    def lack_room(self) -> None:
        """No file can be written for a while, in which the front dies."""
        failures = self.service.log.count("the front can't be started")
        before = self.service.only("front")
        for each in (self._folder / SMALL).glob("*/haproxy.cfg"):
            each.unlink()  # else there is room where it was
        filler = self._folder / SMALL / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(512))
        os.kill(before, signal.SIGKILL)
        until(lambda: self.service.log.count("the front can't be started") > failures)
        filler.unlink()
        until(lambda: self.service.named("front") not in ([], [before]))
        self._ask_until(self._is_whole)

    def _replace(self, name: str, how: int) -> None:
        before = self.service.only(name)
        os.kill(before, how)
        if name == "front":  # what it holds is lost, and others wait
            until(lambda: not is_alive(before))
        self._ask_until(lambda: self.service.named(name) not in ([], [before]))
        self._ask_until(self._is_whole)

    def _ask_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + RENEWAL
        while not condition():
            assert time.monotonic() < end
            self.ask()

    def _is_whole(self) -> bool:
        with suppress(AssertionError):
            return self.service.metric('torchrec_bls_workers{state="ready"}', of=min) == 2
        return False

    def _serves(self) -> int:
        self.ask()
        [version] = self.service.get(f"/v2/models/{self.service.name}")["versions"]
        return int(version.partition("@")[0].removeprefix("v"))

    def _is_not_served(self) -> None:
        until(lambda: self.service.metric("torchrec_bls_refresh_problem", of=max) == 1)
        self.ask()
        # The next one is.
        self.refresh()
        until(lambda: self.service.metric("torchrec_bls_refresh_problem", of=max) == 0)

    def _write(self, *, nan: bool) -> None:
        self._written.append(ranker.write_checkpoint(self._folder / "new", self._version, nan=nan))
        for each in self._written[:-3]:
            shutil.rmtree(each)
        self._written = self._written[-3:]


def used(service: Running) -> tuple[int, int]:
    """Returns bytes (of a page that several have, each has a part) and descriptors of all processes
    of a service."""
    size, descriptors = 0, 0
    for process in (service.pid, *descendants(service.pid)):
        with suppress(OSError):
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
            lines = [line for line in text.splitlines() if line.startswith("Pss:")]
            size += 1024 * int(lines[0].split()[1])
            descriptors += sum(1 for _ in Path(f"/proc/{process}/fd").iterdir())
    return size, descriptors


def used_at_rest(life: Life) -> tuple[int, int]:
    """Returns what a service uses whose workers are forks of the zygote that is there, once that
    stays as it is: those of an earlier one share no memory with it."""
    life.renew()
    service = life.service
    end = time.monotonic() + RENEWAL
    found, since = used(service), time.monotonic()
    while time.monotonic() < since + _AT_REST_S:
        assert time.monotonic() < end
        time.sleep(0.2)
        now = used(service)
        if abs(now[0] - found[0]) > _STAYS or now[1] != found[1]:
            found, since = now, time.monotonic()
    return found


@contextmanager
def living(folder: Path, seed: int) -> Iterator[Life]:
    """Runs a service to which things may happen."""
    (folder / "new").mkdir()
    (folder / SMALL).mkdir()
    checkpoint = ranker.write_checkpoint(folder, 1)
    options = ["--checkpoint", str(checkpoint), "--watch", str(folder / "new")]
    options += ["--deadline-ms", "1000", "--workers", "2", "--front", "haproxy"]
    environment = {ranker.RAISE: str(folder / "raise"), "TMPDIR": str(folder / SMALL)}
    model = "tests.serve.ranker:build_poisonous_unless"
    with (
        small_disk(folder / SMALL),
        running(folder, *options, model=model, environment=environment) as service,
    ):
        yield Life(service, folder, seed)


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mounts a small disk, if this is root."""
    if os.geteuid():
        yield
        return
    disk = ["tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    subprocess.run(["mount", "-t", *disk], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def live(folder: Path, seed: int, actions: int) -> Counter[str]:
    """Returns how many actions of each kind were done. All answers were right, and nothing was lost
    or grew."""
    with living(folder, seed) as life:
        until(life._is_whole)
        before = used_at_rest(life)
        for number in range(actions):
            try:
                life.act()
            except BaseException:
                print(f"seed {seed}, action {number}", file=sys.stderr)
                print(life.service.log[-5000:], file=sys.stderr)
                raise
            if number == actions // 10:
                before = used_at_rest(life)
            if sys.stderr.isatty() and number % 100 == 0:
                print(f"\r{number} of {actions}", end="", file=sys.stderr)
        until(life._is_whole)
        size, descriptors = used_at_rest(life)
        assert size - before[0] < _MOST_GROWTH, (before, size)
        assert descriptors - before[1] < _MOST_DESCRIPTORS, (before, descriptors)
        return life.done


def main() -> None:
    """Prints how many actions of each kind were done."""
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    made.add_argument("--actions", type=int, default=100_000)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--json", type=Path, help="write the counts to this file")
    arguments = made.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        done = live(Path(folder), arguments.seed, arguments.actions)
    seconds = time.monotonic() - began
    print(f"{done.total()} actions in {seconds:.0f} s, none lost or wrong: {dict(done)}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"seconds": seconds, "actions": done}) + "\n")


if __name__ == "__main__":
    main()

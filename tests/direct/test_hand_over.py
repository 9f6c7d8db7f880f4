"""What is said through the socket at which tables are offered, and by whom."""

import os
import socket
import struct
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import pytest

from tests.direct import nodes, served
from tests.direct.answered import DEADLINE, answered
from tests.direct.served import Expected, batches_of, check
from tests.processes import run
from torchrec_bls import attach, offer
from torchrec_bls.direct.offers import listening
from torchrec_bls.direct.offers.conversation import Conversation, Descriptors
from torchrec_bls.direct.offers.listening import listen
from torchrec_bls.errors import (
    BLSError,
    PeerDiedError,
    PeerTimeoutError,
    ProtocolError,
    RendezvousError,
)


@pytest.mark.parametrize(
    ("said", "kind", "text"),
    [
        (b"", PeerDiedError, "ended, or hung up, while tables were handed over"),
        (b"tbbloff", PeerDiedError, "ended, or hung up"),
        (b"HTTP/1.1 400 Bad Request\r\n", ProtocolError, "is no process of torchrec-bls"),
        (
            struct.pack("<8sI", b"tbbloffr", 3),
            ProtocolError,
            "speaks version 3 of the manifest of tables, and this one 4: install one version",
        ),
        (
            struct.pack("<8sIIQ", b"tbbloffr", 4, 0, 1 << 40),
            ProtocolError,
            "announces 1099511627776 bytes and 0 descriptors, more than there can be",
        ),
        (struct.pack("<8sIIQ", b"tbbloffr", 4, 2, 100) + b"{", PeerDiedError, "hung up"),
        (struct.pack("<8sIIQ", b"tbbloffr", 4, 0, 1) + b"{", ProtocolError, "sends no manifest"),
        (struct.pack("<8sIIQ", b"tbbloffr", 4, 2, 2) + b"{}", PeerDiedError, "hung up"),
        (
            struct.pack("<8sIIQ", b"tbbloffr", 4, 2, 2) + b"{}d",
            ProtocolError,
            "announces 2 descriptors and hands 0 over",
        ),
    ],
)
def test_what_speaks_otherwise_is_refused(
    tmp_path: Path, said: bytes, kind: type[Exception], text: str
) -> None:
    path = str(tmp_path / "socket")

    def answer(connected: socket.socket) -> None:
        connected.recv(100)
        connected.sendall(said)

    with answered(path, answer), pytest.raises(kind, match=text):
        attach(served.Model(), path, deadline=DEADLINE)


def test_a_silent_process_is_left_at_the_deadline(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    has_ended = threading.Event()
    with answered(path, lambda _: assert_true(has_ended.wait(DEADLINE))):
        with pytest.raises(
            PeerTimeoutError, match=r"did not answer within 0\.\d+ s: it is stopped"
        ):
            attach(served.Model(), path, deadline=1.0)
        has_ended.set()


def assert_true(value: bool) -> None:
    assert value


def test_nobody_at_the_socket_is_an_error(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with pytest.raises(RendezvousError, match="there is no such socket"):
        attach(served.Model(), path)
    listen(path).close()
    with pytest.raises(RendezvousError, match=r"nobody listens at .*socket: the process"):
        attach(served.Model(), path)
    (tmp_path / "file").touch()
    with pytest.raises(RendezvousError, match=r"nobody listens at .*file"):
        attach(served.Model(), tmp_path / "file")


def test_a_dead_socket_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    listen(path).close()
    with closing(listen(path)):
        assert Path(path).stat().st_mode & 0o777 == 0o600
        with pytest.raises(ValueError, match="a living process offers tables at"):
            listen(path)
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ValueError, match="is there and no socket"):
        listen(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "kept"
    with pytest.raises(ValueError, match="has more than 107 bytes"):
        listen(str(tmp_path / ("long" * 40)))
    with pytest.raises(ValueError, match="is no folder"):
        listen(str(tmp_path / "none" / "socket"))


def test_a_child_does_not_keep_the_folder_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is forked while its parent makes the socket, and lives longer."""
    reading, writing = os.pipe()
    remove, children = listening._remove_a_dead_one, []

    def fork(path: str) -> None:
        children.append(os.fork())
        if children[-1] == 0:
            os.close(writing)
            os.read(reading, 1)  # until the test is done
            os._exit(0)
        remove(path)

    monkeypatch.setattr(listening, "_remove_a_dead_one", fork)
    first = listen(str(tmp_path / "first"))
    monkeypatch.undo()
    listen(str(tmp_path / "second")).close()
    first.close()
    listen(str(tmp_path / "first")).close()
    os.close(writing)
    os.waitpid(children[0], 0)
    os.close(reading)


def attach_across_users(rank: int, folder: str) -> None:
    model, batches = served.sharded(), batches_of(rank)
    check(model, batches, Expected(batches), 0)
    with offer(model, f"{folder}/source") as offered:
        own = os.geteuid()
        text = f"of user {own}, but this one of user {own + 1}: tables are shared"
        geteuid = os.geteuid
        os.geteuid = lambda: own + 1  # type: ignore[assignment]
        try:
            with pytest.raises(
                ProtocolError, match=f"of user {own}, but this one of user {own + 1}"
            ):
                attach(nodes.bare_model(), offered.path, deadline=DEADLINE)
            # What does not ask who is there is asked itself.
            connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connected.connect(offered.path)
            with closing(Conversation(connected, "test", DEADLINE)) as conversation:
                conversation.greet()
                conversation.be_greeted()
                descriptors = Descriptors()
                refused = conversation.receive(descriptors)
                assert text in refused["refused"]
                assert len(descriptors) == 0
        finally:
            os.geteuid = geteuid


def test_another_user_gets_nothing(tmp_path: Path) -> None:
    run(1, attach_across_users, str(tmp_path))


def attach_as_nobody(rank: int, path: str) -> str:
    os.setgid(65534)
    os.setuid(65534)
    with pytest.raises(BLSError) as caught:
        attach(served.Model(), path, deadline=DEADLINE)
    return str(caught.value)


def test_the_socket_is_closed_to_other_users() -> None:
    """Where this process may become another one."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = f"{folder}/socket"
        with closing(listen(path)):
            assert Path(path).stat().st_mode & 0o777 == 0o600
            if os.geteuid() != 0:
                return
            Path(folder).chmod(0o755)
            assert "is another user's" in run(1, attach_as_nobody, path, backend=None)[0]
            Path(path).chmod(0o666)
            (text,) = run(1, attach_as_nobody, path, backend=None)
            assert "is of user 0, but this one of user 65534" in text

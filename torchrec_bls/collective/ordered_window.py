"""Posts that are under way: at most bound + 1, completed in the order in which they were posted."""

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from torchrec_bls import _native
from torchrec_bls.collective.channel import BoundedLagChannel
from torchrec_bls.errors import ProtocolError


class UnderWay(Protocol):
    """A post whose messages are still to be received."""

    @property
    def channel(self) -> BoundedLagChannel:
        """The channel that it was posted on."""

    def receive(self, arrival: _native.Arrival) -> None:
        """Reads the messages, which are gone afterwards, and counts as completed from then on.

        Raises:
            ProtocolError: messages are not what was asked for. The channel fails on all ranks.
        """


P = TypeVar("P", bound=UnderWay)


class OrderedWindow(Generic[P]):
    """The posts of one rank that it has not completed yet, oldest first.

    Messages carry no more than their sequence number, so that what arrives belongs to the oldest
    post of its channel. A failure is the caller's to spread: what it means for other posts differs.

    Args:
        bound: iterations that ranks may be apart.

    Attributes:
        posts: that are under way.
    """

    def __init__(self, bound: int) -> None:
        self.posts: deque[P] = deque()
        self._bound = bound

    @property
    def is_full(self) -> bool:
        """Whether the oldest post has to be completed before another one."""
        return len(self.posts) > self._bound

    def post(self, post: P, send: Callable[[_native.Channel], object]) -> None:
        """Sends by `send`, and adds `post` if its messages have left, whatever `send` raises.

        A signal may be raised between any two lines: `post` is there before its messages leave.
        """
        native = post.channel.native
        posted = native.posted
        try:
            self.posts.append(post)
            with post.channel.range("post"):
                send(native)
        except BaseException:
            if native.posted == posted and self.posts and self.posts[-1] is post:
                self.posts.pop()
            raise

    def complete_oldest(self) -> P:
        """Waits for the messages of the oldest post, and returns it once it has received them.

        It stays the oldest if that fails.

        Raises:
            BLSError: a rank failed or died, or the messages were refused.
        """
        post = self.posts[0]
        channel = post.channel
        with channel.range("wait"):
            arrival = channel.native.wait()
        try:
            post.receive(arrival)
        except ProtocolError as error:
            raise channel.refuse(arrival, str(error)) from error
        channel.native.release(arrival.sequence, channel.own)
        self.posts.popleft()
        return post

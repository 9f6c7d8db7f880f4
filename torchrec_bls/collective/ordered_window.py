"""Posts under way: at most bound + 1, completed in the order in which they were posted."""

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from torchrec_bls import _native
from torchrec_bls.collective.channel import BoundedLagChannel, in_range, refuse
from torchrec_bls.errors import ProtocolError


class UnderWay(Protocol):
    """A post whose messages are still to be received."""

    @property
    def channel(self) -> BoundedLagChannel:
        """The channel that it was posted on."""

    def receive(self, arrival: _native.Arrival) -> None:
        """Reads the messages, which are gone afterwards. From then on the post counts as completed.

        Raises:
            ProtocolError: the messages are not the expected ones. The channel fails on all ranks.
        """


P = TypeVar("P", bound=UnderWay)


class OrderedWindow(Generic[P]):
    """The posts of one rank that it has not completed yet, oldest first.

    Messages carry only their sequence number. So an arrival belongs to the oldest post of its
    channel. The caller passes failures on: their meaning for other posts differs.

    Args:
        bound: iterations that ranks may be apart.

    Attributes:
        posts: posts under way.
    """

    def __init__(self, bound: int) -> None:
        self.posts: deque[P] = deque()
        self._bound = bound

    @property
    def is_full(self) -> bool:
        """Returns whether the oldest post has to be completed before a further one."""
        return len(self.posts) > self._bound

    def post(self, post: P, send: Callable[[_native.Channel], object]) -> None:
        """Sends by `send`, and adds `post` if its messages have left, even if `send` raises.

        A signal may raise between any two lines. So `post` is added before its messages leave.
        """
        native = post.channel.native
        posted = native.posted
        try:
            self.posts.append(post)
            in_range(post.channel, "post", send, native)
        except BaseException:
            if native.posted == posted and self.posts and self.posts[-1] is post:
                self.posts.pop()
            raise

    def complete_oldest(self) -> P:
        """Waits for the messages of the oldest post. Returns the post once it has received them.

        If that fails, the post stays the oldest.

        Raises:
            BLSError: a rank failed or died, or the messages were refused.
        """
        post = self.posts[0]
        channel = post.channel
        arrival = in_range(channel, "wait", channel.native.wait)
        try:
            post.receive(arrival)
        except ProtocolError as error:
            raise refuse(channel, arrival, str(error)) from error
        channel.native.release(arrival.sequence, channel.own)
        self.posts.popleft()
        return post

#include "transport/tcp/tcp_transport.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include "errors.h"

namespace bls {
namespace {

/// How long telling others of a failure may take.
constexpr std::chrono::milliseconds kPoisonGrace{200};
/// How long the last thing that was told may take to the peers. Kernels answer within 0.04 s.
constexpr std::chrono::seconds kLeaving{1};
/// Nothing tells when the kernel has sent all: a rank that waits for that looks this often.
constexpr std::chrono::microseconds kBetweenLooks{500};
/// The kernel keeps less of a message for a receiver that does not read, and then stops its sender.
constexpr size_t kKept = size_t{256} << 10;
constexpr uint64_t kWake = std::numeric_limits<uint64_t>::max();

/// Where nothing was sent, probes notice within the deadline that a host has vanished; where
/// something was, `is_silent` does. TCP_USER_TIMEOUT would, too, but it also ends the connection to
/// a rank that lives and has left the kernel no room for so long.
void watch_peer(int fd, std::chrono::milliseconds deadline) {
  const int on = 1;
  const int seconds =
      std::max(1, static_cast<int>(std::min<int64_t>(deadline.count() / 4000, 32767)));
  const int probes = 2;
  // Errors are those of sockets that are none of TCP.
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof(seconds));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof(seconds));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
}

/// Whether a host has answered nothing for so long, although it was asked again and again.
bool is_silent(int fd, std::chrono::milliseconds limit) {
  tcp_info info{};
  socklen_t bytes = sizeof(info);
  return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0 &&
         info.tcpi_retransmits + info.tcpi_probes >= 2 && info.tcpi_last_ack_recv >= limit.count();
}

std::vector<size_t> places_for(const std::vector<Descriptor>& sockets) {
  std::vector<size_t> places;
  size_t connected = 0;
  for (const Descriptor& socket : sockets) places.push_back(socket.get() < 0 ? 0 : ++connected);
  return places;
}

[[noreturn]] void refuse(const FrameHead& head) {
  throw ChannelError(ErrorKind::kProtocol, "a frame of kind " +
                                               std::to_string(static_cast<uint32_t>(head.kind)) +
                                               ", " + std::to_string(head.bytes) +
                                               " bytes, number " + std::to_string(head.number) +
                                               " can't be right here: install one version "
                                               "of torchrec-bls on all ranks");
}

}  // namespace

TcpTransport::Peer::Peer(TcpTransport& of, int of_rank, Descriptor of_socket)
    : transport(of),
      rank(of_rank),
      socket(std::move(of_socket)),
      reader(*this),
      exposed(of.shape_.slots),
      pulled(of.shape_.slots) {}

void TcpTransport::Large::hold(size_t message_bytes) {
  if (memory.get_deleter().bytes < message_bytes) {
    memory.reset();
    memory = zeroed_pages(message_bytes);
  }
  bytes = message_bytes;
  there = 0;
}

TcpTransport::TcpTransport(std::vector<Descriptor> sockets, const RingShape& shape,
                           std::chrono::milliseconds deadline)
    : shape_(shape),
      deadline_(deadline),
      stride_(slot_stride(shape.slot_bytes)),
      places_(places_for(sockets)),
      ring_bytes_(bls::ring_bytes(std::ranges::max(places_) + 1, shape.slots, shape.slot_bytes)),
      inbox_(zeroed_pages(ring_bytes_)),
      outbox_(zeroed_pages(ring_bytes_)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      background_(Background::of_process()) {
  if (stride_ > std::numeric_limits<uint32_t>::max()) {
    throw std::invalid_argument("slots of " + std::to_string(shape.slot_bytes) +
                                " bytes are larger than a message over TCP may be, 4 GiB");
  }
  if (epoll_.get() < 0 || wake_.get() < 0) {
    throw ChannelError(ErrorKind::kTransport,
                       std::string("no descriptor for a channel over TCP: ") +
                           std::strerror(errno) + ". Raise the limit of open files (ulimit -n)");
  }
  watch(wake_, kWake);
  for (int rank = 0; rank < shape.world_size; ++rank) {
    peers_.push_back(
        std::make_unique<Peer>(*this, rank, std::move(sockets[static_cast<size_t>(rank)])));
    const Descriptor& socket = peers_.back()->socket;
    if (socket.get() < 0) continue;
    watch_peer(socket.get(), deadline);
    fcntl(socket.get(), F_SETFL, fcntl(socket.get(), F_GETFL) | O_NONBLOCK);
    watch(socket, static_cast<uint64_t>(rank));
  }
  background_number_ = background_.add(*this);  // last: it has to be removed again
}

TcpTransport::~TcpTransport() { background_.remove(background_number_); }

void TcpTransport::watch(const Descriptor& of, uint64_t name) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = name;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, of.get(), &event) != 0) {
    throw ChannelError(ErrorKind::kTransport,
                       std::string("a connection can't be watched: ") + std::strerror(errno));
  }
}

// What the kernel has.

/// Takes what has come, and sends what there is room for now.
void TcpTransport::take_events() {
  called();
  computing_ = false;
  std::array<epoll_event, 64> events;
  const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<size_t>(i)];
    if (event.data.u64 == kWake) {
      uint64_t calls;
      [[maybe_unused]] const ssize_t read_bytes = ::read(wake_.get(), &calls, sizeof(calls));
      continue;
    }
    Peer& peer = *peers_[event.data.u64];
    if ((event.events & EPOLLOUT) != 0) write(peer);
    if ((event.events & ~uint32_t{EPOLLOUT}) != 0) read(peer);
  }
}

void TcpTransport::read(Peer& peer) {
  while (read_once(peer)) {
  }
}

/// Returns whether more may be there.
bool TcpTransport::read_once(Peer& peer) {
  if (peer.socket.get() < 0) return false;
  std::array<iovec, 2> room = peer.reader.room();
  const size_t space = room[0].iov_len + room[1].iov_len;
  const ssize_t bytes = readv(peer.socket.get(), room.data(), 2);
  if (bytes < 0) {
    if (errno != EINTR && errno != EAGAIN) lose_by_errno(peer, errno);
    return errno == EINTR;
  }
  if (bytes == 0) {
    hang_up(peer);
    return false;
  }
  try {
    peer.reader.take(static_cast<size_t>(bytes));
  } catch (const std::exception& error) {
    lose(peer, PeerState::kFailed, error.what());
    return false;
  }
  return static_cast<size_t>(bytes) == space;
}

/// Sends what the kernel has room for. What is left to do goes on in the next call, or in the
/// background if there is none soon.
void TcpTransport::write(Peer& peer) {
  send(peer);
  if (peer.socket.get() < 0) return;
  if (peer.awaits_room != peer.lacks_room) await_room(peer);
  if (is_looked_at_ || (!peer.lacks_room && peer.most_bytes <= kKept)) return;
  try {
    begin_looks();
  } catch (const ChannelError& error) {
    lose(peer, PeerState::kFailed, error.what());
  }
}

void TcpTransport::begin_looks() {
  background_.begin_looks();
  is_looked_at_ = true;
}

void TcpTransport::await_room(Peer& peer) {
  peer.awaits_room = peer.lacks_room;
  epoll_event event{};
  event.events = EPOLLIN | (peer.lacks_room ? EPOLLOUT : 0u);
  event.data.u64 = static_cast<uint64_t>(peer.rank);
  // Changing what is there takes no memory, and fails for nothing that is right.
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, peer.socket.get(), &event);
}

void TcpTransport::send(Peer& peer) {
  peer.lacks_room = false;
  while (peer.socket.get() >= 0 && peer.write_error == 0) {
    std::array<iovec, 2> pieces = peer.writer.pieces();
    const bool is_idle = pieces[0].iov_len + pieces[1].iov_len == 0;
    ssize_t bytes = -1;
    if (!is_idle) {
      msghdr message{};
      message.msg_iov = pieces.data();
      message.msg_iovlen = pieces.size();
      bytes = sendmsg(peer.socket.get(), &message, MSG_NOSIGNAL);
      if (bytes < 0 && errno == EINTR) continue;
    }
    if (bytes >= 0) {
      peer.writer.sent(static_cast<size_t>(bytes));
      continue;
    }
    if (!is_idle && errno != EAGAIN) {
      // What the peer has sent before its end is read yet, and says more than this error.
      peer.write_error = errno;
      peer.writer.clear();
      return;
    }
    peer.lacks_room = !is_idle;
    return;
  }
}

/// Of the background: a rank that has made no call since the last look, and does not sleep for
/// events, does something else.
bool TcpTransport::look() {
  const std::lock_guard lock(mutex_);
  if (!is_looked_at_) return false;
  const bool is_elsewhere = std::exchange(calls_seen_, calls_) == calls_ && sleepers_.load() == 0;
  const bool has_more = std::ranges::any_of(
      peers_, [](const auto& peer) { return peer->lacks_room || peer->most_bytes > kKept; });
  is_away_ = has_more && is_elsewhere;
  is_looked_at_ = has_more && !is_elsewhere;
  for (const auto& peer : peers_) {
    if (is_away_) go_on_later(*peer);
  }
  return is_looked_at_;
}

/// Of the background: little at once, since the rank may want the lock.
void TcpTransport::go_on(int index) {
  const std::lock_guard lock(mutex_);
  if (!is_away_) return;
  Peer& peer = of(index);
  if (computing_) read_once(peer);
  send(peer);
  go_on_later(peer);
}

void TcpTransport::go_on_later(Peer& peer) {
  const uint32_t events =
      (peer.lacks_room ? EPOLLOUT : 0u) | (computing_ && peer.most_bytes > kKept ? EPOLLIN : 0u);
  if (events == 0 || peer.socket.get() < 0) return;
  try {
    background_.await(background_number_, peer.rank, peer.socket.get(), events);
  } catch (const ChannelError& error) {
    lose(peer, PeerState::kFailed, error.what());
  }
}

void TcpTransport::called() {
  ++calls_;
  if (std::exchange(is_away_, false)) begin_looks();  // what is left is not awaited any more
}

// What comes.

std::byte* TcpTransport::Peer::place(const FrameHead& head) {
  const RingShape& shape = transport.shape_;
  const bool is_count = head.kind == FrameKind::kCredit || head.kind == FrameKind::kEnd ||
                        head.kind == FrameKind::kClosed;
  if (is_count && head.bytes == 0) return nullptr;
  if (head.kind == FrameKind::kMessage && head.number == received &&
      head.bytes <= transport.stride_ - sizeof(uint64_t)) {
    return transport.slot_in(transport.inbox_, rank, transport.slot_at(received)) +
           sizeof(uint64_t);
  }
  if (head.kind == FrameKind::kPoison && head.bytes <= kMostPoison &&
      head.number < static_cast<uint64_t>(shape.world_size)) {
    return reinterpret_cast<std::byte*>(poison_text);
  }
  if (head.kind == FrameKind::kLarge && received != 0 && head.number == received - 1) {
    Large& large = pulled[transport.slot_at(head.number)];
    if (large.bytes == 0) {
      if (head.whole == 0 || head.whole > kMaxRingBytes) refuse(head);
      large.hold(head.whole);
    }
    if (head.whole == large.bytes && head.bytes <= large.bytes - large.there && head.bytes != 0) {
      return large.memory.get() + large.there;
    }
  }
  refuse(head);
}

void TcpTransport::Peer::complete(const FrameHead& head) {
  switch (head.kind) {
    case FrameKind::kMessage:
      pulled[transport.slot_at(received)].bytes = 0;  // what it may have outside is on its way
      ++received;
      most_bytes = std::max<size_t>(head.bytes, most_bytes / 2);
      arrival_word(transport.slot_in(transport.inbox_, rank, transport.slot_at(head.number)))
          .store(received, std::memory_order_release);
      break;
    case FrameKind::kLarge:
      pulled[transport.slot_at(head.number)].there += head.bytes;
      most_bytes = std::max<size_t>(head.whole, most_bytes);
      break;
    case FrameKind::kCredit:
      credit = head.number;
      break;
    case FrameKind::kEnd:
      ended = head.number;
      break;
    case FrameKind::kPoison:
      transport.keep_poison({static_cast<int>(head.number), std::string(poison_text, head.bytes)});
      break;
    case FrameKind::kClosed:
      closed = head.number;
      break;
  }
}

void TcpTransport::hang_up(Peer& peer) {
  if (peer.closed && peer.received >= *peer.closed) return end(peer);
  lose_by_errno(peer, peer.write_error != 0 ? peer.write_error : EPIPE);
}

void TcpTransport::lose_by_errno(Peer& peer, int error) {
  switch (error) {
    case EPIPE:
    case ECONNRESET:
      return lose(peer, PeerState::kDead, "");  // there is nothing more to say
    case ETIMEDOUT:
    case EHOSTUNREACH:
    case ENETUNREACH:
      return lose(peer, PeerState::kDead,
                  std::string("its host answers nothing (") + std::strerror(error) +
                      "): it is down, or the network between is");
    default:
      return lose(peer, PeerState::kFailed,
                  std::string("the connection failed: ") + std::strerror(error));
  }
}

void TcpTransport::lose(Peer& peer, PeerState state, const std::string& what) {
  if (!peer.fault) peer.fault = {state, what};
  end(peer);
}

void TcpTransport::end(Peer& peer) {
  peer.writer.clear();
  // A forked child may have a copy for a moment yet, which would go on to be an event.
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, peer.socket.get(), nullptr);
  peer.socket.close();
}

// The contract.

void TcpTransport::progress() {
  const std::lock_guard lock(mutex_);
  take_events();
}

std::byte* TcpTransport::inbox(int source, uint32_t slot) { return slot_in(inbox_, source, slot); }

std::byte* TcpTransport::outbox(int destination, uint32_t slot) {
  // Its receiver has read what stood here, so that all of it has left.
  return slot_in(outbox_, destination, slot);
}

void TcpTransport::deliver(int destination, std::byte* slot, size_t bytes, uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  called();
  computing_ = true;
  Peer& peer = of(destination);
  peer.posted = sequence + 1;
  Large& exposed = peer.exposed[slot_at(sequence)];
  const bool is_large = std::exchange(exposed.is_next, false);
  if (peer.socket.get() < 0 || peer.closed) return;  // `wait` tells
  peer.writer.message(sequence, slot + sizeof(uint64_t), bytes - sizeof(uint64_t));
  if (is_large) peer.writer.large(sequence, exposed.memory.get(), exposed.bytes);
  write(peer);
}

void TcpTransport::return_credit(int source, uint64_t consumed) {
  const std::lock_guard lock(mutex_);
  called();
  computing_ = true;
  of(source).writer.credit(consumed);
  write(of(source));
}

uint64_t TcpTransport::credit(int destination) {
  const std::lock_guard lock(mutex_);
  take_events();
  return of(destination).credit;
}

void TcpTransport::tell_end(uint64_t count) {
  const std::lock_guard lock(mutex_);
  for (const auto& peer : peers_) {
    peer->writer.end(count);
    write(*peer);
  }
}

uint64_t TcpTransport::ended(int peer) {
  const std::lock_guard lock(mutex_);
  take_events();
  return of(peer).ended;
}

std::byte* TcpTransport::expose(int destination, uint32_t slot, size_t bytes,
                                MemoryAddress& address) {
  const std::lock_guard lock(mutex_);
  Large& large = of(destination).exposed[slot];
  large.hold(bytes);
  large.is_next = true;
  address = {{}, bytes};
  return large.memory.get();
}

void TcpTransport::retract(int destination, uint32_t slot) {
  const std::lock_guard lock(mutex_);
  of(destination).exposed[slot] = Large();
}

const std::byte* TcpTransport::pull(int source, uint32_t slot, const MemoryAddress& address,
                                    size_t bytes) {
  std::unique_lock lock(mutex_);
  Peer& peer = of(source);
  Large& large = peer.pulled[slot];
  const bool ended = await(lock, deadline_, interrupt_, [&] {
    return large.is_whole() || peer.socket.get() < 0 || poisoned_.load() != 0;
  });
  if (large.is_whole()) {
    if (address.bytes == bytes && large.bytes == bytes) return large.memory.get();
    throw ChannelError(ErrorKind::kProtocol, "its parts take " + std::to_string(bytes) +
                                                 " bytes, it announces " +
                                                 std::to_string(address.bytes) + ", and " +
                                                 std::to_string(large.bytes) + " came");
  }
  if (!ended) {
    throw ChannelError(ErrorKind::kTimeout, std::to_string(large.there) + " of its " +
                                                std::to_string(bytes) +
                                                " bytes came within the deadline");
  }
  throw ChannelError(ErrorKind::kTransport, peer.fault ? peer.fault->text : "it did not come");
}

void TcpTransport::drop(int source, uint32_t slot) {
  const std::lock_guard lock(mutex_);
  Large& large = of(source).pulled[slot];
  large.memory = ZeroedPages();
}

template <class Done>
bool TcpTransport::await(std::unique_lock<std::mutex>& lock, Clock::duration limit,
                         const Interrupt& interrupt, Done done) {
  const Clock::time_point start = Clock::now();
  for (;;) {
    take_events();
    if (done()) return true;
    const Clock::time_point now = Clock::now();
    if (now - start >= limit) return false;
    lock.unlock();
    if (interrupt && now - start >= kBeforeInterrupt) interrupt();
    sleep_for_events(std::min(now + kBetweenLooks, start + limit));
    lock.lock();
  }
}

void TcpTransport::sleep_for_events(Clock::time_point until) {
  const auto left = std::chrono::ceil<std::chrono::nanoseconds>(until - Clock::now()).count();
  if (left <= 0) return;
  const timespec timeout{static_cast<time_t>(left / 1'000'000'000),
                         static_cast<long>(left % 1'000'000'000)};
  pollfd events{epoll_.get(), POLLIN, 0};
  ++sleepers_;
  ppoll(&events, 1, &timeout, nullptr);
  --sleepers_;
}

void TcpTransport::sleep(bool (*ready)(void*), void* context, Clock::time_point until) {
  {
    const std::lock_guard lock(mutex_);
    computing_ = false;
  }
  // What comes after the look is an event.
  if (!ready(context) && poisoned_.load() == 0) sleep_for_events(until);
}

void TcpTransport::arm() {
  {
    const std::lock_guard lock(arming_);
    armed_ = true;
  }
  armed_or_woken_.notify_one();
}

/// Not without `arm`: a rank that computes leaves what has come unread, and that stays an event.
void TcpTransport::await_event(Clock::time_point until) {
  {
    std::unique_lock lock(arming_);
    if (!armed_or_woken_.wait_until(lock, until, [this] { return armed_; })) return;
    armed_ = false;
  }
  sleep_for_events(until);
}

void TcpTransport::wake_self() {
  arm();
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof(one));
}

// Failures and ends.

Poison TcpTransport::poison() const {
  const std::lock_guard lock(mutex_);
  return {static_cast<int32_t>(poisoned_.load()) - 1, poison_text_};
}

void TcpTransport::adopt_poison(const Poison& poison) {
  const std::lock_guard lock(mutex_);
  keep_poison(poison);
}

void TcpTransport::keep_poison(const Poison& poison) {
  if (poisoned_.load() != 0) return;
  poison_text_ = poison.message;
  poisoned_.store(static_cast<uint32_t>(poison.origin) + 1, std::memory_order_release);
}

void TcpTransport::poison_all(const std::string& message) {
  std::unique_lock lock(mutex_);
  take_events();  // what came first stays
  keep_poison({shape_.rank, message});
  spread_poison(lock);
}

void TcpTransport::pass_poison_on() {
  std::unique_lock lock(mutex_);
  take_events();
  if (poisoned_.load() != 0) spread_poison(lock);
}

void TcpTransport::spread_poison(std::unique_lock<std::mutex>& lock) {
  if (std::exchange(poison_spread_, true)) return;
  for (const auto& peer : peers_) {
    if (peer->socket.get() < 0 || peer->closed) continue;
    peer->writer.poison({static_cast<int32_t>(poisoned_.load()) - 1, poison_text_});
    write(*peer);
  }
  await(lock, kPoisonGrace, nullptr, [this] { return all_have_left(); });
}

PeerState TcpTransport::peer_state(int index) {
  const std::lock_guard lock(mutex_);
  take_events();
  Peer& peer = of(index);
  // The kernel goes on to ask for a quarter of an hour.
  if (peer.socket.get() >= 0 && is_silent(peer.socket.get(), deadline_)) {
    lose_by_errno(peer, ETIMEDOUT);
  }
  // What it sent before it closed may still be on its way.
  if (peer.closed && peer.received >= *peer.closed) return PeerState::kClosed;
  return peer.fault ? peer.fault->state : PeerState::kOpen;
}

bool TcpTransport::still_reads(int index) {
  const std::lock_guard lock(mutex_);
  take_events();
  const Peer& peer = of(index);
  return !peer.closed && !peer.fault;
}

std::string TcpTransport::peer_fault(int peer) {
  const std::lock_guard lock(mutex_);
  return of(peer).fault ? of(peer).fault->text : std::string();
}

bool TcpTransport::on_its_way(int source, uint64_t sequence) {
  const std::lock_guard lock(mutex_);
  take_events();
  const Peer& peer = of(source);
  return peer.received > sequence || peer.reader.is_within(sequence);
}

void TcpTransport::announce_close() {
  std::unique_lock lock(mutex_);
  take_events();
  for (const auto& peer : peers_) {
    // Also to those that have closed: they may be keeping a large message for this rank.
    peer->writer.closed(peer->posted);
    write(*peer);
  }
  // Nobody expects anything of a rank that has failed, and one of its peers may be dead.
  const Clock::duration limit = poisoned_.load() != 0 ? Clock::duration(kPoisonGrace) : deadline_;
  await(lock, limit, interrupt_, [this] { return all_have_left(); });
}

/// Whether the kernel has all that this rank told, but for what nobody wants any more.
bool TcpTransport::all_have_left() const {
  return std::ranges::all_of(peers_, [](const auto& peer) {
    return peer->writer.idle() || peer->closed || peer->socket.get() < 0;
  });
}

/// Whether it is at the peers' hosts.
bool TcpTransport::all_have_come() const {
  return std::ranges::all_of(peers_, [](const auto& peer) {
    int unanswered = 0;
    return peer->closed || peer->socket.get() < 0 ||
           ioctl(peer->socket.get(), SIOCOUTQ, &unanswered) != 0 || unanswered == 0;
  });
}

/// A process that ends while it has something to read resets its connections, and what its kernel
/// has sent is not sent again then.
void TcpTransport::leave() {
  std::unique_lock lock(mutex_);
  await(lock, std::min<Clock::duration>(deadline_, kLeaving), nullptr,
        [this] { return all_have_come(); });
}

void TcpTransport::abandon() {
  for (const auto& peer : peers_) peer->socket.close();
  epoll_.close();
  wake_.close();
}

}  // namespace bls

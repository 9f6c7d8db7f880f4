#include "tests/support/two_sided_mesh.h"

#include <algorithm>
#include <cstring>

#include "errors.h"

namespace bls::testing {
namespace {

/// What a note of the messenger over torch.distributed has room for.
constexpr size_t kPoisonText = 1000;
constexpr std::chrono::seconds kTimeToPull{60};

size_t lines_for(const RingShape& shape) {
  return Slots{shape, nullptr}.bytes() / sizeof(TwoSidedMesh::Line);
}

std::byte* start_of(std::vector<TwoSidedMesh::Line>& memory) { return memory.front().bytes; }

}  // namespace

TwoSidedMesh::Rank::Rank(const RingShape& shape)
    : inbox_memory(lines_for(shape)),
      outbox_memory(lines_for(shape)),
      outboxes{shape, start_of(outbox_memory)},
      inbox(std::make_shared<TwoSidedInbox>(Slots{shape, start_of(inbox_memory)})) {}

TwoSidedMesh::TwoSidedMesh(const Setup& setup) {
  const size_t slot_bytes = align_up(setup.slot_bytes, kCacheLine);
  for (int rank = 0; rank < setup.world_size; ++rank) {
    ranks.push_back(
        std::make_unique<Rank>(RingShape{rank, setup.world_size, setup.slot_count(), slot_bytes}));
  }
}

MeshMessenger::MeshMessenger(std::shared_ptr<TwoSidedMesh> mesh, int rank)
    : mesh_(std::move(mesh)), rank_(rank) {
  rounds_ = std::thread([this] { carry_rounds(); });
  listener_ = std::thread([this] { hear(); });
}

MeshMessenger::~MeshMessenger() {
  {
    const Lock lock(mesh_->mutex);
    own().gone = true;
    mesh_->changed.notify_all();
  }
  rounds_.join();
  listener_.join();
}

void MeshMessenger::exchange(uint32_t slot, uint64_t sequence, std::span<const size_t>) {
  const Lock lock(mesh_->mutex);
  own().started = sequence + 1;
  to_send_.push_back({slot, sequence, std::exchange(leaving_, {})});
  mesh_->changed.notify_all();
}

std::byte* MeshMessenger::expose(int destination, uint32_t slot, size_t bytes) {
  Bytes& memory = exposed_[{destination, slot}];
  memory.resize(std::max(memory.size(), bytes));
  leaving_.push_back({destination, memory.data(), bytes});
  return memory.data();
}

const std::byte* MeshMessenger::pull(int source, uint32_t slot, size_t bytes) {
  Lock lock(mesh_->mutex);
  const auto here = [&] { return own().large.contains({source, slot}); };
  if (!mesh_->changed.wait_for(lock, kTimeToPull, here)) {
    throw ChannelError(ErrorKind::kTimeout, "it did not come");
  }
  Bytes& message = pulled_[{source, slot}];
  message = std::move(own().large.extract({source, slot}).mapped());
  expect(message.size() == bytes, "a message of another size was sent");
  return message.data();
}

void MeshMessenger::return_credit(int source, uint64_t consumed) {
  TwoSidedInbox& inbox = *mesh_->ranks[static_cast<size_t>(source)]->inbox;
  tell(source, [&inbox, rank = rank_, consumed] { inbox.read(rank, consumed); });
}

void MeshMessenger::ask(int peer) {
  // The peer answers when it hears this; this messenger may be gone by then, and the mesh is not.
  tell(peer, [&mesh = *mesh_, &inbox = *own().inbox, peer] {
    Lock lock(mesh.mutex);
    const uint64_t posted = mesh.ranks[static_cast<size_t>(peer)]->started;
    lock.unlock();
    inbox.posted(peer, posted);
  });
}

void MeshMessenger::ask_for_end(int peer) {
  tell(peer, [&mesh = *mesh_, &inbox = *own().inbox, peer] {
    inbox.ended(peer, mesh.ranks[static_cast<size_t>(peer)]->inbox->told_end());
  });
}

void MeshMessenger::spread_poison(int origin, const std::string& message) {
  const std::string text = message.substr(0, kPoisonText);
  tell_all([origin, text](TwoSidedInbox& inbox) { inbox.poison(origin, text); });
}

void MeshMessenger::close(uint64_t posted) {
  tell_all([rank = rank_, posted, end = own().inbox->told_end()](TwoSidedInbox& inbox) {
    inbox.ended(rank, end);
    inbox.closed(rank, posted);
  });
  Lock lock(mesh_->mutex);
  mesh_->changed.wait(lock, [&] { return to_send_.empty(); });
}

void MeshMessenger::carry_rounds() {
  Lock lock(mesh_->mutex);
  for (;;) {
    mesh_->changed.wait(lock, [&] { return own().gone || !to_send_.empty() || is_complete(); });
    if (own().gone) return;
    if (!to_send_.empty()) {
      send(lock);
    } else {
      complete(lock);
    }
  }
}

void MeshMessenger::send(Lock& lock) {
  const Round round = to_send_.front();
  const Slots& outboxes = own().outboxes;
  const size_t slot_bytes = outboxes.shape.slot_bytes;
  for (int peer = 0; peer < mesh_->world_size(); ++peer) {
    if (peer == rank_) continue;
    lock.unlock();
    const std::byte* const slot = outboxes.slot(peer, round.slot);
    Bytes copy(slot, slot + slot_bytes);
    lock.lock();
    mesh_->ranks[static_cast<size_t>(peer)]->slots[{rank_, round.sequence}] = std::move(copy);
    mesh_->changed.notify_all();
  }
  // Behind the slots: a receiver may have to wait for them.
  for (const Large& large : round.large) {
    lock.unlock();
    Bytes copy(large.data, large.data + large.bytes);
    lock.lock();
    mesh_->ranks[static_cast<size_t>(large.destination)]->large[{rank_, round.slot}] =
        std::move(copy);
    mesh_->changed.notify_all();
  }
  to_send_.pop_front();
  to_complete_.push_back(round);
  mesh_->changed.notify_all();
}

bool MeshMessenger::is_complete() {
  if (to_complete_.empty()) return false;
  for (int peer = 0; peer < mesh_->world_size(); ++peer) {
    if (peer != rank_ && !own().slots.contains({peer, to_complete_.front().sequence})) return false;
  }
  return true;
}

void MeshMessenger::complete(Lock& lock) {
  const Round round = to_complete_.front();
  to_complete_.pop_front();
  for (int peer = 0; peer < mesh_->world_size(); ++peer) {
    if (peer == rank_) continue;
    const Bytes came = std::move(own().slots.extract({peer, round.sequence}).mapped());
    lock.unlock();
    std::byte* const slot = own().inbox->slots().slot(peer, round.slot);
    arrival_word(slot).store(0);  // as in the sender's slot; ranks look at it meanwhile
    std::memcpy(slot + sizeof(uint64_t), came.data() + sizeof(uint64_t),
                came.size() - sizeof(uint64_t));
    own().inbox->arrived(peer, round.sequence);
    lock.lock();
  }
}

void MeshMessenger::hear() {
  Lock lock(mesh_->mutex);
  for (;;) {
    mesh_->changed.wait(lock, [&] { return own().gone || !own().notes.empty(); });
    if (own().gone) return;
    const std::function<void()> note = std::move(own().notes.front());
    own().notes.pop_front();
    lock.unlock();
    note();
    lock.lock();
    ++own().heard;
    mesh_->changed.notify_all();
  }
}

void MeshMessenger::tell(int peer, std::function<void()> note) {
  const Lock lock(mesh_->mutex);
  TwoSidedMesh::Rank& told = *mesh_->ranks[static_cast<size_t>(peer)];
  told.notes.push_back(std::move(note));
  ++told.told;
  mesh_->changed.notify_all();
}

void MeshMessenger::tell_all(const News& news) {
  for (int peer = 0; peer < mesh_->world_size(); ++peer) {
    TwoSidedInbox& inbox = *mesh_->ranks[static_cast<size_t>(peer)]->inbox;
    if (peer != rank_) tell(peer, [&inbox, news] { news(inbox); });
  }
  Lock lock(mesh_->mutex);
  for (int peer = 0; peer < mesh_->world_size(); ++peer) {
    if (peer == rank_) continue;
    const TwoSidedMesh::Rank& told = *mesh_->ranks[static_cast<size_t>(peer)];
    mesh_->changed.wait(lock, [&, until = told.told] { return told.gone || told.heard >= until; });
  }
}

Transports two_sided_transports(const Setup& setup) {
  const auto mesh = std::make_shared<TwoSidedMesh>(setup);
  Transports transports;
  for (int rank = 0; rank < setup.world_size; ++rank) {
    const TwoSidedMesh::Rank& own = *mesh->ranks[static_cast<size_t>(rank)];
    transports.push_back(std::make_unique<TwoSidedTransport>(
        std::make_unique<MeshMessenger>(mesh, rank), own.inbox, own.outboxes));
  }
  return transports;
}

}  // namespace bls::testing

#include "transport/tcp/frames.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace bls {

FrameReader::FrameReader(FrameSink& sink)
    : sink_(sink), staged_(std::make_unique_for_overwrite<std::byte[]>(kStaged)) {}

std::array<iovec, 2> FrameReader::room() {
  return {{{at_, left_}, {staged_.get() + staged_bytes_, kStaged - staged_bytes_}}};
}

void FrameReader::take(size_t bytes) {
  const size_t in_place = std::min(bytes, left_);
  at_ += in_place;
  left_ -= in_place;
  if (within_ && left_ == 0) finish();
  const std::byte* from = staged_.get();
  const std::byte* const end = from + staged_bytes_ + (bytes - in_place);
  for (;;) {
    if (within_) {
      const auto copied = std::min(left_, static_cast<size_t>(end - from));
      if (copied != 0) std::memcpy(at_, from, copied);
      from += copied;
      at_ += copied;
      left_ -= copied;
      if (left_ != 0) break;
      finish();
    }
    if (static_cast<size_t>(end - from) < sizeof(head_)) break;
    std::memcpy(&head_, from, sizeof(head_));
    from += sizeof(head_);
    at_ = sink_.place(head_);
    left_ = head_.bytes;
    within_ = true;
  }
  staged_bytes_ = static_cast<size_t>(end - from);
  std::memmove(staged_.get(), from, staged_bytes_);
}

void FrameReader::finish() {
  within_ = false;
  sink_.complete(head_);
}

void FrameWriter::message(uint64_t sequence, const std::byte* payload, size_t bytes) {
  waiting_.push_back({FrameKind::kMessage, sequence, payload, bytes});
}

void FrameWriter::large(uint64_t sequence, const std::byte* payload, size_t bytes) {
  waiting_.push_back({FrameKind::kLarge, sequence, payload, bytes});
}

void FrameWriter::poison(const Poison& poison) {
  poison_ = {poison.origin, poison.message.substr(0, kMostPoison)};
}

void FrameWriter::clear() {
  waiting_.clear();
  credit_ = end_ = closed_ = std::nullopt;
  poison_.reset();
  head_left_ = payload_left_ = 0;
}

bool FrameWriter::idle() const {
  return head_left_ == 0 && payload_left_ == 0 && waiting_.empty() && !credit_ && !end_ &&
         !closed_ && !poison_;
}

std::array<iovec, 2> FrameWriter::pieces() {
  if (head_left_ == 0 && payload_left_ == 0 && !begin_next()) return {};
  std::byte* const head = reinterpret_cast<std::byte*>(&head_) + (sizeof(head_) - head_left_);
  // Only read from: sendmsg takes what it may not change as if it might.
  return {{{head, head_left_}, {const_cast<std::byte*>(payload_), payload_left_}}};
}

void FrameWriter::sent(size_t bytes) {
  const size_t of_head = std::min(bytes, head_left_);
  head_left_ -= of_head;
  payload_ += bytes - of_head;
  payload_left_ -= bytes - of_head;
}

/// Begins the next frame. Returns whether there is one.
bool FrameWriter::begin_next() {
  if (poison_) {
    text_ = std::move(poison_->message);
    begin(FrameKind::kPoison, static_cast<uint64_t>(poison_->origin),
          reinterpret_cast<const std::byte*>(text_.data()), text_.size());
    poison_.reset();
  } else if (end_) {
    begin(FrameKind::kEnd, *std::exchange(end_, std::nullopt), nullptr, 0);
  } else if (credit_) {
    begin(FrameKind::kCredit, *std::exchange(credit_, std::nullopt), nullptr, 0);
  } else if (closed_) {
    begin(FrameKind::kClosed, *std::exchange(closed_, std::nullopt), nullptr, 0);
  } else if (!waiting_.empty()) {
    Waiting& next = waiting_.front();
    if (next.kind == FrameKind::kMessage) {
      begin(next.kind, next.sequence, next.payload, next.bytes);
      next.cut = next.bytes;
    } else {
      const size_t piece = std::min(kPiece, next.bytes - next.cut);
      begin(next.kind, next.sequence, next.payload + next.cut, piece, next.bytes);
      next.cut += piece;
    }
    if (next.cut == next.bytes) waiting_.pop_front();
  } else {
    return false;
  }
  return true;
}

void FrameWriter::begin(FrameKind kind, uint64_t number, const std::byte* payload, size_t bytes,
                        uint64_t whole) {
  head_ = {kind, static_cast<uint32_t>(bytes), number, whole};
  head_left_ = sizeof(head_);
  payload_ = payload;
  payload_left_ = bytes;
}

}  // namespace bls

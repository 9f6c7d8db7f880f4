// The row messages: whatever a peer sends, only rows of the expected size are written.

#include <numeric>

#include "fuzz/arrival.h"
#include "messages/rows/row_message.h"

namespace bls::fuzzing {
namespace {

constexpr size_t kRowBytes = 8;

/// The message that is expected, or one of other sizes.
std::vector<Bytes> take_message(Input& input, size_t expected_bytes) {
  const auto mode = input.take<uint8_t>();
  const size_t parts = mode & 1 ? input.take_up_to(3) : 1;
  std::vector<Bytes> message;
  for (size_t i = 0; i < parts; ++i) {
    message.push_back(Bytes(mode & 2 ? input.take<uint16_t>() % 2048 : expected_bytes));
  }
  return message;
}

HostileArrival take_arrival(Input& input, const std::vector<size_t>& expected_bytes) {
  std::vector<std::vector<Bytes>> parts;
  for (const size_t bytes : expected_bytes) parts.push_back(take_message(input, bytes));
  return HostileArrival(std::move(parts));
}

void collect_by_source(Input& input) {
  std::vector<int64_t> rows;
  std::vector<size_t> bytes;
  for (int source = 0; source < kWorldSize; ++source) {
    rows.push_back(static_cast<int64_t>(input.take_up_to(20)));
    bytes.push_back(static_cast<size_t>(rows.back()) * kRowBytes);
  }
  const int64_t all = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  std::vector<int64_t> permutation;
  if (input.take<uint8_t>() & 1) {
    for (int64_t row = all - 1; row >= 0; --row) permutation.push_back(row);
  }
  const HostileArrival arrival = take_arrival(input, bytes);
  Bytes out(static_cast<size_t>(all) * kRowBytes);
  accepts([&] { collect_rows(*arrival, out.data(), kRowBytes, rows, permutation); });
}

void collect_by_feature(Input& input) {
  const size_t features = input.take_up_to(3);
  const int order[kWorldSize] = {1, 2, 0};
  std::vector<int64_t> counts;
  std::vector<size_t> bytes(kWorldSize);
  size_t all = 0;
  for (size_t i = 0; i < features * kWorldSize; ++i) {
    counts.push_back(static_cast<int64_t>(input.take_up_to(9)));
    const size_t of_count = static_cast<size_t>(counts.back()) * kRowBytes;
    bytes[static_cast<size_t>(order[i % kWorldSize])] += of_count;
    all += of_count;
  }
  const HostileArrival arrival = take_arrival(input, bytes);
  Bytes out(all);
  accepts([&] { collect_grouped_rows(*arrival, out.data(), {kRowBytes, counts, order}); });
}

void collect_summed_columns(Input& input) {
  const size_t rows = input.take_up_to(20);
  const size_t width = 4 * input.take_up_to(4);
  const size_t other_width = 4 * input.take_up_to(4);
  const HostileArrival arrival =
      take_arrival(input, {rows * width, rows * width, rows * other_width});
  const ColumnGroup groups[] = {{0, 2, other_width, width}, {2, 1, 0, other_width}};
  const size_t out_row_bytes = width + other_width;
  Bytes out(rows * out_row_bytes);
  accepts([&] { collect_columns(*arrival, out.data(), rows, out_row_bytes, groups); });
}

void place_stored_rows(Input& input) {
  std::vector<PlacedRows> placed;
  std::vector<size_t> bytes(kWorldSize), blocks(kWorldSize);
  size_t end = 0;
  for (size_t source = 0; source < kWorldSize; ++source) {
    blocks[source] = input.take_up_to(3);
    for (size_t i = 0; i < blocks[source]; ++i) {
      const size_t rows = input.take_up_to(9), row_bytes = 1 + input.take_up_to(40);
      placed.push_back({end, rows, row_bytes, row_bytes + input.take_up_to(15)});
      end += rows * placed.back().pitch;
      bytes[source] += rows * row_bytes;
    }
  }
  const HostileArrival arrival = take_arrival(input, bytes);
  Bytes out(end);
  accepts([&] { collect_placed_rows(*arrival, out.data(), out.size(), placed, blocks); });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  switch (input.take_up_to(3)) {
    case 0:
      collect_by_source(input);
      break;
    case 1:
      collect_by_feature(input);
      break;
    case 2:
      collect_summed_columns(input);
      break;
    default:
      place_stored_rows(input);
  }
  return 0;
}

}  // namespace bls::fuzzing

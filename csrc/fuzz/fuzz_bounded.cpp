// Error-bounded rows: whatever a peer sends, only rows of the plan are written; and what a decoder
// makes of rows is within their bound.

#include <cmath>
#include <cstring>
#include <vector>

#include "codecs/bounded/bounded.h"
#include "fuzz/input.h"

namespace bls::fuzzing {
namespace {

/// Groups as they first appear.
std::vector<uint32_t> take_groups(Input& input, size_t rows, size_t& count) {
  std::vector<uint32_t> groups(rows);
  for (uint32_t& group : groups) {
    group = static_cast<uint32_t>(input.take_up_to(count));
    count += group == count;
  }
  return groups;
}

bool is_near(float value, float decoded, float bound) {
  if (std::memcmp(&value, &decoded, sizeof value) == 0) return true;  // NaN, too
  return std::abs(double{value} - double{decoded}) <= double{bound};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  const auto how = input.take<uint8_t>();
  const bool encodes = how & 1, fixed_width = how & 2, has_groups = input.take<uint8_t>() & 1;
  const float bound = std::ldexp(1.0f, static_cast<int>(input.take_up_to(40)) - 20);
  const size_t rows = input.take_up_to(60), columns = input.take_up_to(150);
  size_t count = 0;
  const std::vector<uint32_t> of_row =
      has_groups ? take_groups(input, rows, count) : std::vector<uint32_t>();
  const RowGroups groups{of_row, count};
  // Of exactly this size, so that the address sanitizer sees every byte beyond.
  std::vector<float> values(rows * columns), decoded(rows * columns);
  std::vector<std::byte> bytes = input.take_bytes(encodes ? rows * columns * 4 : input.left());
  if (!encodes) {
    accepts([&] {
      bounded::decode(bound, bytes, {decoded.data(), rows, columns, columns}, groups);
    });
    return 0;
  }
  if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  if (has_groups && columns > 0) {
    std::vector<const float*> first(count, nullptr);
    for (size_t row = 0; row < rows; ++row) {
      const float*& from = first[of_row[row]];
      if (from == nullptr) from = values.data() + row * columns;
      std::copy_n(from, columns, values.data() + row * columns);
    }
  }
  const Matrix<const float> matrix{values.data(), rows, columns, columns};
  bytes.resize(bounded::encode(bound, matrix, groups, fixed_width, {}));
  require(bounded::encode(bound, matrix, groups, fixed_width, bytes) == bytes.size(),
          "another size");
  const Matrix<float> back{decoded.data(), rows, columns, columns};
  require(bounded::decode(bound, bytes, back, groups) == bytes.size(), "other bytes");
  for (size_t i = 0; i < values.size(); ++i) {
    require(is_near(values[i], decoded[i], bound), "a value beyond the bound");
  }
  return 0;
}

}  // namespace bls::fuzzing

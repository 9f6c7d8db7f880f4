#include "codecs/bounded/symbols/fixed_width.h"

#include <algorithm>

#include "codecs/bounded/symbols/bits.h"
#include "codecs/bounded/symbols/prefix_code.h"

namespace bls::bounded {
namespace {

constexpr uint64_t kEachByte = 0x0101010101010101;

/// Codes of bytes side by side in the low bits of a word, and back. Halves of the word are moved
/// towards each other, then quarters and eighths: the same on all processors, of which some need
/// long for the instruction that does it.
class EightCodes {
 public:
  explicit EightCodes(int bits) {
    for (int i = 0; i < 3; ++i) {
      const int fields = 4 >> i;  // in each half
      const uint64_t field = (uint64_t{1} << (fields * bits)) - 1;
      Step& step = steps_[i];
      step.distance = fields * (8 - bits);
      for (int at = 0; at < 64; at += 16 * fields) step.low |= field << at;
      step.high = step.low << (8 * fields);
    }
  }
  uint64_t joined(uint64_t bytes) const {
    for (int i = 3; i-- > 0;) {
      bytes = (bytes & steps_[i].low) | (bytes & steps_[i].high) >> steps_[i].distance;
    }
    return bytes;
  }
  uint64_t parted(uint64_t codes) const {
    for (const Step& step : steps_) {
      codes = (codes & step.low) | (codes << step.distance & step.high);
    }
    return codes;
  }

 private:
  struct Step {
    uint64_t low = 0, high = 0;
    int distance = 0;
  };
  Step steps_[3];
};

/// Eight bits are the whole symbol, of which the first one has the place 0.
constexpr std::byte kSign{0x80};

}  // namespace

std::byte* write_fixed_width(FixedWidth code, const int8_t* symbols, size_t count, std::byte* out) {
  if (code.bits == 8) {
    return std::transform(symbols, symbols + count, out,
                          [](int8_t symbol) { return static_cast<std::byte>(symbol) ^ kSign; });
  }
  const EightCodes eight(code.bits);
  const uint64_t flipped = 0x80 * kEachByte, first = static_cast<uint64_t>(code.first) * kEachByte;
  size_t i = 0;
  for (; i + 8 <= count; i += 8, out += code.bits) {
    const uint64_t bytes = load_bits(reinterpret_cast<const std::byte*>(symbols + i));
    // No symbol is before the first one, so that nothing is borrowed from the byte above.
    store_bits(eight.joined((bytes ^ flipped) - first) << (64 - 8 * code.bits), out);
  }
  BitWriter writer(out);
  for (; i < count; ++i) {
    writer.put(static_cast<uint32_t>(place_of(symbols[i]) - code.first), code.bits);
  }
  return writer.finish();
}

const std::byte* read_fixed_width(FixedWidth code, const std::byte* in, const std::byte* end,
                                  int8_t* symbols, size_t count) {
  if (code.bits == 8) {
    if (static_cast<size_t>(end - in) < count) return nullptr;
    std::transform(in, in + count, symbols,
                   [](std::byte byte) { return static_cast<int8_t>(byte ^ kSign); });
    return in + count;
  }
  const EightCodes eight(code.bits);
  const uint64_t flipped = 0x80 * kEachByte, first = static_cast<uint64_t>(code.first) * kEachByte;
  size_t i = 0;
  for (; i + 8 <= count && end - in >= 8; i += 8, in += code.bits) {
    const uint64_t bytes = eight.parted(load_bits(in) >> (64 - 8 * code.bits));
    store_bits((bytes + first) ^ flipped, reinterpret_cast<std::byte*>(symbols + i));
  }
  BitReader reader(in, end);
  for (; i < count; ++i) {
    const auto place = reader.take(code.bits) + static_cast<uint32_t>(code.first);
    symbols[i] = static_cast<int8_t>(place - static_cast<uint32_t>(place_of(0)));
  }
  return reader.finish();
}

}  // namespace bls::bounded

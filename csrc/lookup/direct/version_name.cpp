#include "lookup/direct/version_name.h"

#include <cstdint>

namespace bls {
namespace {

struct Lead {
  size_t followers;
  uint32_t bits;
  uint32_t least;  // code point that needs so many bytes
};

constexpr uint32_t kLast = 0x10FFFF, kFirstSurrogate = 0xD800, kLastSurrogate = 0xDFFF;

Lead lead_of(uint8_t byte) {
  if (byte < 0x80) return {0, byte, 1};
  if (byte >= 0xC0 && byte < 0xE0) return {1, byte & 0x1Fu, 0x80};
  if (byte >= 0xE0 && byte < 0xF0) return {2, byte & 0x0Fu, 0x800};
  if (byte >= 0xF0 && byte < 0xF8) return {3, byte & 0x07u, 0x10000};
  return {0, 0, 1};  // none
}

}  // namespace

bool is_version(std::string_view text) {
  if (text.empty() || text.size() > kLongestVersion) return false;
  for (size_t at = 0; at < text.size(); ++at) {
    const Lead lead = lead_of(static_cast<uint8_t>(text[at]));
    uint32_t point = lead.bits;
    if (lead.followers >= text.size() - at) return false;
    for (size_t left = lead.followers; left > 0; --left) {
      const auto byte = static_cast<uint8_t>(text[++at]);
      if ((byte & 0xC0u) != 0x80) return false;
      point = point << 6 | (byte & 0x3Fu);
    }
    if (point < lead.least || point > kLast) return false;
    if (point >= kFirstSurrogate && point <= kLastSurrogate) return false;
  }
  return true;
}

}  // namespace bls

// Frames of encoded rows: whatever a peer sends, only rows of the plan are written.

#include <cstring>
#include <vector>

#include "codecs/checksum.h"
#include "codecs/frame.h"
#include "fuzz/input.h"

namespace bls::fuzzing {

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input input(data, size);
  const bool knows_checksum = input.take<uint8_t>() & 1;
  std::vector<FrameTable<float>> tables(input.take_up_to(3));
  std::vector<std::vector<float>> values;
  for (FrameTable<float>& table : tables) {
    table.codec = static_cast<Codec>(input.take_up_to(kCodecs - 1));
    const size_t rows = input.take_up_to(4), columns = input.take_up_to(70);
    // Of exactly this size, so that the address sanitizer sees every byte beyond.
    values.emplace_back(rows * columns);
    table.rows = {values.back().data(), rows, columns, columns};
  }
  std::vector<std::byte> frame = input.take_bytes(input.left());
  if (knows_checksum && frame.size() >= kFrameHeaderBytes) {
    const uint32_t checksum = crc32c({frame.data() + 8, frame.size() - 8});
    std::memcpy(frame.data() + 4, &checksum, sizeof checksum);
  }
  accepts([&] { decode_frame(frame, tables); });
  return 0;
}

}  // namespace bls::fuzzing

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "errors.h"
#include "lookup/direct/table_segment.h"
#include "tests/support/checks.h"

using namespace bls;
using namespace bls::testing;

namespace {

const TableLabel kLabel{3, "seven", {std::byte{1}, std::byte{2}}};

TableSegment segment_of(const std::vector<float>& table, const TableLabel& label = kLabel) {
  const TablePart part{reinterpret_cast<const std::byte*>(table.data()),
                       table.size() * sizeof(float), TableSegment::kFirstOffset};
  const std::vector<TablePart> parts{part};
  return TableSegment::create(label, parts, part.offset + part.bytes, HugePages::kNo);
}

float first_of(const std::byte* data) {
  float value;
  std::memcpy(&value, data + TableSegment::kFirstOffset, sizeof(value));
  return value;
}

/// A memory file as anybody may announce it.
Descriptor file_of(size_t bytes, int seals) {
  Descriptor file(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(ftruncate(file.get(), static_cast<off_t>(bytes)) == 0);
  REQUIRE(fcntl(file.get(), F_ADD_SEALS, seals) == 0);
  return file;
}

constexpr int kAllSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL;

}  // namespace

TEST_CASE("nobody can change a segment once it is made") {
  const TableSegment segment = segment_of({1.5F, 2.5F});
  CHECK(first_of(segment.data()) == 1.5F);
  const int fd = segment.descriptor();
  CHECK(ftruncate(fd, 10) != 0);
  CHECK(pwrite(fd, "x", 1, TableSegment::kFirstOffset) < 0);
  CHECK(mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
}

TEST_CASE("parts come one after the other, and one that does not fit makes no segment") {
  const std::vector<float> values{1.0F, 2.0F, 3.0F};
  size_t made = 0;
  float part = 0.0F;  // the only one at a time
  const NextPart next = [&]() -> std::optional<TablePart> {
    if (made == values.size()) return std::nullopt;
    part = values[made];
    const size_t offset = TableSegment::kFirstOffset + made++ * sizeof(float);
    return TablePart{reinterpret_cast<const std::byte*>(&part), sizeof(part), offset};
  };
  const size_t bytes = TableSegment::kFirstOffset + values.size() * sizeof(float);
  const TableSegment segment = TableSegment::create(kLabel, next, bytes, HugePages::kNo);
  CHECK(std::memcmp(segment.data() + TableSegment::kFirstOffset, values.data(),
                    values.size() * sizeof(float)) == 0);
  made = 0;
  CHECK_THROWS_AS(TableSegment::create(kLabel, next, bytes - 1, HugePages::kNo),
                  std::invalid_argument);
}

TEST_CASE("another mapping shows the same tables, after their creator has gone as well") {
  std::vector<TableSegment> kept;
  {
    const TableSegment segment = segment_of(std::vector<float>(3 << 20, 4.0F));
    kept.push_back(TableSegment::open(segment.address(), kLabel));
  }
  CHECK(first_of(kept[0].data()) == 4.0F);
  // And it can be handed on.
  kept.push_back(TableSegment::open(kept[0].address(), kLabel));
  CHECK(kept[1].size() == kept[0].size());
  CHECK(first_of(kept[1].data()) == 4.0F);
}

TEST_CASE("private pages are written to without the segment seeing it") {
  const TableSegment segment = segment_of({1.0F, 2.0F});
  const PrivatePages pages(segment);
  const float other = 9.0F;
  std::memcpy(pages.data() + TableSegment::kFirstOffset, &other, sizeof(other));
  CHECK(first_of(pages.data()) == 9.0F);
  CHECK(first_of(segment.data()) == 1.0F);
}

TEST_CASE("what is not the segment that is expected is not used") {
  const TableSegment segment = segment_of({1.0F});
  TableLabel owner = kLabel, version = kLabel, layout = kLabel;
  owner.owner = 4;
  version.version = "seve";
  layout.layout[5] = std::byte{1};
  for (const TableLabel& other : {owner, version, layout}) {
    CHECK_THROWS_AS(TableSegment::open(segment.address(), other), ChannelError);
  }
  MemoryFileAddress recycled = segment.address();
  recycled.inode += 1;
  CHECK_THROWS_AS(TableSegment::open(recycled, kLabel), ChannelError);
  MemoryFileAddress longer = segment.address();
  longer.bytes += 4096;
  CHECK_THROWS_AS(TableSegment::open(longer, kLabel), ChannelError);
}

TEST_CASE("a descriptor that is no sealed segment is refused") {
  CHECK_THROWS_AS(TableSegment::adopt(file_of(8192, kAllSeals), kLabel), ChannelError);  // no label
  CHECK_THROWS_AS(TableSegment::adopt(file_of(100, kAllSeals), kLabel), ChannelError);
  CHECK_THROWS_AS(TableSegment::adopt(file_of(0, kAllSeals), kLabel), ChannelError);
  CHECK_THROWS_AS(TableSegment::adopt(file_of(8192, F_SEAL_SHRINK), kLabel), ChannelError);
  CHECK_THROWS_AS(TableSegment::adopt(Descriptor(), kLabel), ChannelError);
  CHECK_THROWS_AS(TableSegment::adopt(Descriptor(open("/dev/null", O_RDONLY)), kLabel),
                  ChannelError);
}

TEST_CASE("a segment of another version of this package is refused by that name") {
  Descriptor file(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(pwrite(file.get(), "tbblst01", 8, 0) == 8);
  REQUIRE(ftruncate(file.get(), 8192) == 0);
  REQUIRE(fcntl(file.get(), F_ADD_SEALS, kAllSeals) == 0);
  check_failure(failure_of([&] { TableSegment::adopt(std::move(file), kLabel); }),
                ErrorKind::kProtocol, "is of another version of torchrec-bls");
}

TEST_CASE("a label of no version is refused before anything is made") {
  CHECK_THROWS_AS(segment_of({1.0F}, {3, "", {}}), std::invalid_argument);
  CHECK_THROWS_AS(segment_of({1.0F}, {3, std::string(65, 'x'), {}}), std::invalid_argument);
}

TEST_CASE("parts beyond the segment are refused before anything is made") {
  const float value = 1;
  const auto* data = reinterpret_cast<const std::byte*>(&value);
  const auto create = [&](size_t offset, size_t bytes, size_t room) {
    const std::vector<TablePart> parts{{data, bytes, offset}};
    return TableSegment::create(kLabel, parts, room, HugePages::kNo);
  };
  CHECK_THROWS_AS(create(0, 4, 8192), std::invalid_argument);  // over the label
  CHECK_THROWS_AS(create(8190, 4, 8192), std::invalid_argument);
  CHECK_THROWS_AS(create(4096, ~size_t{0}, 8192), std::invalid_argument);
  CHECK(create(8188, 4, 8192).size() == 8192);
}

TEST_CASE("a lack of memory is said before any is taken") {
  const std::vector<TablePart> none;
  CHECK_THROWS_AS(TableSegment::create(kLabel, none, size_t{1} << 50, HugePages::kNo),
                  ChannelError);
}

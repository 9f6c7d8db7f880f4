// Stands in for libFuzzer where there is none: runs a target on every file of a folder, or on as
// many changed ones as are asked for. Execution n is the same in every run, so that a search goes
// on behind the last one, and one execution is repeated by its number.

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

// A finding ends in abort(), which tells the execution's number; memory that was freed is not kept
// for long, as the search would take twice the time.
extern "C" const char* __asan_default_options() { return "abort_on_error=1:quarantine_size_mb=4"; }
extern "C" const char* __ubsan_default_options() { return "abort_on_error=1"; }

namespace {

using Bytes = std::vector<uint8_t>;

constexpr uint64_t kReport = 1000000;

volatile uint64_t execution = 0;

void tell_execution(int signal) {
  std::fprintf(stderr, "finding in execution %llu\n", static_cast<unsigned long long>(execution));
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

/// SplitMix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  size_t below(size_t end) {
    uint64_t word = state_ += 0x9e3779b97f4a7c15;
    word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9;
    word = (word ^ word >> 27) * 0x94d049bb133111eb;
    return static_cast<size_t>((word ^ word >> 31) % end);
  }

 private:
  uint64_t state_;
};

void change(Bytes& bytes, const std::vector<Bytes>& inputs, Random& random) {
  const size_t at = random.below(bytes.size() + 1);
  const auto place = bytes.begin() + static_cast<ptrdiff_t>(at);
  const auto byte = static_cast<uint8_t>(random.below(256));
  const size_t how = random.below(8);
  if (how == 0) {
    bytes.insert(place, byte);
  } else if (how == 1) {
    const Bytes& other = inputs[random.below(inputs.size())];
    const size_t from = random.below(other.size() + 1);
    bytes.erase(place, bytes.end());
    bytes.insert(bytes.end(), other.begin() + static_cast<ptrdiff_t>(from), other.end());
  } else if (at == bytes.size()) {
    bytes.resize(at + random.below(8), byte);
  } else if (how == 2) {
    bytes.erase(place);
  } else if (how == 3) {
    *place = static_cast<uint8_t>(*place + (byte & 1 ? 1 : -1));
  } else if (how < 6) {
    *place = byte;
  } else {
    *place ^= static_cast<uint8_t>(1u << (byte & 7));
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::filesystem::path> files;
  if (argc >= 2 && argc <= 4) {
    for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
      files.push_back(entry.path());
    }
  }
  if (files.empty()) {
    std::fprintf(stderr, "usage: %s FOLDER_WITH_INPUTS [EXECUTIONS [FIRST]]\n", argv[0]);
    return 1;
  }
  std::sort(files.begin(), files.end());
  std::vector<Bytes> inputs;
  for (const auto& file : files) {
    if (argc == 2) {
      std::printf("%s\n", file.filename().c_str());
      std::fflush(stdout);  // names the file that ends the program
    }
    std::ifstream stream(file, std::ios::binary);
    inputs.emplace_back(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
    LLVMFuzzerTestOneInput(inputs.back().data(), inputs.back().size());
  }
  if (argc == 2) return 0;
  std::signal(SIGABRT, tell_execution);
  const uint64_t first = argc == 4 ? std::strtoull(argv[3], nullptr, 10) : 0;
  const uint64_t last = first + std::strtoull(argv[2], nullptr, 10);
  for (uint64_t number = first; number < last; ++number) {
    execution = number;
    Random random(number << 20);
    Bytes bytes = inputs[random.below(inputs.size())];
    for (size_t changes = 1 + random.below(4); changes > 0; --changes) {
      change(bytes, inputs, random);
    }
    // In memory of just the size, so that the address sanitizer sees every byte beyond.
    bytes.shrink_to_fit();
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    if ((number + 1) % kReport == 0) {
      std::printf("%llu executions\n", static_cast<unsigned long long>(number + 1 - first));
      std::fflush(stdout);
    }
  }
  return 0;
}

// Stands in for libFuzzer where there is none: runs a target on every file of a folder.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int argc, char** argv) {
  std::vector<std::filesystem::path> files;
  if (argc == 2) {
    for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
      files.push_back(entry.path());
    }
  }
  if (files.empty()) {
    std::fprintf(stderr, "usage: %s FOLDER_WITH_INPUTS\n", argv[0]);
    return 1;
  }
  std::sort(files.begin(), files.end());
  for (const auto& file : files) {
    std::printf("%s\n", file.filename().c_str());
    std::fflush(stdout);  // names the file that ends the program
    std::ifstream stream(file, std::ios::binary);
    const std::vector<uint8_t> bytes(std::istreambuf_iterator<char>(stream), {});
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  }
  return 0;
}

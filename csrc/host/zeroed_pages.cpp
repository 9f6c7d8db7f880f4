#include "host/zeroed_pages.h"

#include <sys/mman.h>

#include <string>

#include "errors.h"

namespace bls {

void Unmap::operator()(std::byte* at) const { munmap(at, bytes); }

ZeroedPages zeroed_pages(size_t bytes) {
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) {
    throw ChannelError(ErrorKind::kTransport,
                       "no memory for " + std::to_string(bytes) +
                           " bytes of messages: use smaller ones, or smaller slots, or raise "
                           "the limit of memory (ulimit -v, --memory of a container)");
  }
  return ZeroedPages(static_cast<std::byte*>(at), Unmap{bytes});
}

}  // namespace bls

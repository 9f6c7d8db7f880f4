#pragma once

#include <string>

#include "errors.h"

namespace bls::bounded {

/// Of rows that no encoder wrote.
[[noreturn]] inline void refuse(const char* what) {
  throw ChannelError(ErrorKind::kProtocol, std::string("error-bounded rows ") + what);
}

}  // namespace bls::bounded

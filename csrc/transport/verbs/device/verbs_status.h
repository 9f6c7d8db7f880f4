#pragma once

#include <infiniband/verbs.h>

#include <string>

namespace bls {

/// What a failed completion says about the peer, with the likely cause and the cure.
std::string explain_status(ibv_wc_status status, uint32_t vendor_error);

/// The same for an event of the device.
std::string explain_event(ibv_event_type event);

}  // namespace bls

#include "transport/verbs/device/verbs_status.h"

namespace bls {
namespace {

constexpr const char* kOneVersion =
    ". Two versions of torchrec-bls cause this: install one on all ranks. If there is only one, "
    "this is an error in torchrec-bls, please report it";
constexpr const char* kReport = ": this is an error in torchrec-bls, please report it";
constexpr const char* kKernelLog = ": look at the kernel log (dmesg)";

}  // namespace

std::string explain_status(ibv_wc_status status, uint32_t vendor_error) {
  const std::string detail =
      " (status " + std::to_string(status) + ", vendor " + std::to_string(vendor_error) + ")";
  switch (status) {
    case IBV_WC_RETRY_EXC_ERR:
      return "it does not answer (transport retries exceeded): its process or host has ended, or "
             "the network between loses everything. Look at that rank's own output, then at the "
             "link (ibv_devinfo, rdma link, ping between the two addresses)";
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return "it has no receive posted (receiver not ready, retries exceeded)" +
             std::string(kOneVersion);
    case IBV_WC_REM_ACCESS_ERR:
      return "it refused access to its memory (remote access error)" + std::string(kOneVersion);
    case IBV_WC_REM_INV_REQ_ERR:
      return "it refused a request as invalid" + detail + kOneVersion;
    case IBV_WC_REM_OP_ERR:
      return "it could not complete a request" + detail +
             ": look at that rank's own output and at its host's kernel log";
    case IBV_WC_WR_FLUSH_ERR:
      return "the connection was ended by a request of that rank that this one refused, or by the "
             "device (flushed): look at that rank's own output";
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_LEN_ERR:
    case IBV_WC_LOC_QP_OP_ERR:
    case IBV_WC_LOC_ACCESS_ERR:
      return "the own device refused a request" + detail + kReport;
    case IBV_WC_RESP_TIMEOUT_ERR:
    case IBV_WC_FATAL_ERR:
    case IBV_WC_GENERAL_ERR:
      return "the device failed" + detail + kKernelLog;
    default:
      return "a request failed" + detail + kKernelLog + " of both hosts";
  }
}

std::string explain_event(ibv_event_type event) {
  switch (event) {
    case IBV_EVENT_DEVICE_FATAL:
      return std::string("the device failed or was removed") + kKernelLog;
    case IBV_EVENT_CQ_ERR:
      return std::string("a completion queue overflowed") + kReport;
    case IBV_EVENT_SRQ_ERR:
      return std::string("a receive queue failed") + kKernelLog;
    case IBV_EVENT_QP_ACCESS_ERR:
      return "it wanted memory that this rank does not offer (access violation)" +
             std::string(kOneVersion);
    case IBV_EVENT_QP_REQ_ERR:
      return "it sent a request that is invalid" + std::string(kOneVersion);
    default:
      return "the connection failed (device event " + std::to_string(event) + ")" + kKernelLog;
  }
}

}  // namespace bls

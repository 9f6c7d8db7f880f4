#pragma once

#include <cstdint>

/// The part of DLPack's C interface, version 1, that reads a tensor in place. Its layouts are fixed
/// (https://dmlc.github.io/dlpack/latest/c_api.html); names are as there.
namespace bls::dlpack {

inline constexpr int32_t kDLCPU = 1;
inline constexpr uint8_t kDLInt = 0;
inline constexpr uint8_t kDLUInt = 1;
inline constexpr uint8_t kDLFloat = 2;
inline constexpr uint8_t kDLBfloat = 4;
inline constexpr uint32_t kMajorVersion = 1;

struct DLDevice {
  int32_t device_type;
  int32_t device_id;
};

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

/// Shape and strides, in items, lie in the tensor.
struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DLPackVersion {
  uint32_t major;
  uint32_t minor;
};

struct DLPackExchangeAPI {
  struct {
    DLPackVersion version;
    void* prev_api;
  } header;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  /// Returns 0, or -1 with a Python exception set. Null where the producer has none.
  int (*dltensor_from_py_object_no_sync)(void* py_object, DLTensor* out);
  void* current_work_stream;
};

}  // namespace bls::dlpack

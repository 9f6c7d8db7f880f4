#include "messages/reduction.h"

#include <algorithm>
#include <cstring>

#include "codecs/kernels/kernels.h"

namespace bls {
namespace {

// Elements reduced before the next ones are begun: small enough for the nearest cache.
constexpr size_t kBlock = 1024;

/// Elements of type `T`, reduced as they are.
template <class T>
struct Plain {
  using Value = T;
  static constexpr size_t kBytes = sizeof(T);
  static const T* load(const std::byte* from, size_t, T*) {
    return reinterpret_cast<const T*>(from);
  }
  static void store(const T* from, size_t count, std::byte* to) {
    std::memmove(to, from, count * sizeof(T));  // of one source onto itself, perhaps
  }
};

/// Elements of type `T`, reduced as `Accumulator`.
template <class T, class Accumulator>
struct Widened {
  using Value = Accumulator;
  static constexpr size_t kBytes = sizeof(T);
  static const Value* load(const std::byte* from, size_t count, Value* to) {
    const T* numbers = reinterpret_cast<const T*>(from);
    for (size_t i = 0; i < count; ++i) to[i] = static_cast<Value>(numbers[i]);
    return to;
  }
  static void store(const Value* from, size_t count, std::byte* to) {
    T* numbers = reinterpret_cast<T*>(to);
    for (size_t i = 0; i < count; ++i) numbers[i] = static_cast<T>(from[i]);
  }
};

struct Float16 {
  using Value = float;
  static constexpr size_t kBytes = 2;
  static const float* load(const std::byte* from, size_t count, float* to) {
    kernels().from_float16(from, count, to);
    return to;
  }
  static void store(const float* from, size_t count, std::byte* to) {
    kernels().to_float16(from, count, to);
  }
};

struct Bfloat16 {
  using Value = float;
  static constexpr size_t kBytes = 2;
  static const float* load(const std::byte* from, size_t count, float* to) {
    kernels().from_bfloat16(from, count, to);
    return to;
  }
  static void store(const float* from, size_t count, std::byte* to) {
    kernels().to_bfloat16(from, count, to);
  }
};

struct Sum {
  template <class Value>
  static Value apply(Value a, Value b) {
    return static_cast<Value>(a + b);
  }
};

// What is not equal to itself is a NaN, and stays.
struct Max {
  template <class Value>
  static Value apply(Value a, Value b) {
    return b > a || b != b ? b : a;
  }
};

struct Min {
  template <class Value>
  static Value apply(Value a, Value b) {
    return b < a || b != b ? b : a;
  }
};

template <class Type, class Operation>
void reduce_as(std::span<const std::byte* const> sources, size_t count, std::byte* out,
               size_t divisor = 1) {
  using Value = typename Type::Value;
  alignas(64) Value result[kBlock];
  alignas(64) Value next[kBlock];
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t length = std::min(kBlock, count - at);
    const size_t offset = at * Type::kBytes;
    const Value* so_far = Type::load(sources[0] + offset, length, result);
    for (const std::byte* source : sources.subspan(1)) {
      const Value* more = Type::load(source + offset, length, next);
      for (size_t i = 0; i < length; ++i) result[i] = Operation::apply(so_far[i], more[i]);
      so_far = result;
    }
    if (divisor != 1) {
      const Value by = static_cast<Value>(divisor);
      for (size_t i = 0; i < length; ++i) result[i] = so_far[i] / by;
      so_far = result;
    }
    Type::store(so_far, length, out + offset);
  }
}

/// `Added` for sums and `Compared` for the rest.
template <class Added, class Compared>
void reduce_by(Reduction reduction, std::span<const std::byte* const> sources, size_t count,
               std::byte* out) {
  switch (reduction) {
    case Reduction::kSum:
      return reduce_as<Added, Sum>(sources, count, out);
    case Reduction::kAverage:
      return reduce_as<Added, Sum>(sources, count, out, sources.size());
    case Reduction::kMax:
      return reduce_as<Compared, Max>(sources, count, out);
    case Reduction::kMin:
      return reduce_as<Compared, Min>(sources, count, out);
  }
}

}  // namespace

size_t bytes_of(Element element) {
  switch (element) {
    case Element::kFloat16:
    case Element::kBfloat16:
      return 2;
    case Element::kFloat64:
    case Element::kInt64:
      return 8;
    default:
      return 4;
  }
}

const char* name_of(Element element) {
  constexpr const char* kNames[] = {"float32", "float64", "float16", "bfloat16", "int32", "int64"};
  return kNames[static_cast<size_t>(element)];
}

const char* name_of(Reduction reduction) {
  constexpr const char* kNames[] = {"SUM", "AVG", "MAX", "MIN"};
  return kNames[static_cast<size_t>(reduction)];
}

void reduce(Element element, Reduction reduction, std::span<const std::byte* const> sources,
            size_t count, std::byte* out) {
  switch (element) {
    case Element::kFloat32:
      // The sum of two is rounded once in either way.
      if (sources.size() == 2 && reduction == Reduction::kSum) {
        return reduce_as<Plain<float>, Sum>(sources, count, out);
      }
      return reduce_by<Widened<float, double>, Plain<float>>(reduction, sources, count, out);
    case Element::kFloat64:
      return reduce_by<Plain<double>, Plain<double>>(reduction, sources, count, out);
    case Element::kFloat16:
      return reduce_by<Float16, Float16>(reduction, sources, count, out);
    case Element::kBfloat16:
      return reduce_by<Bfloat16, Bfloat16>(reduction, sources, count, out);
    // Unsigned, where sums may wrap around.
    case Element::kInt32:
      return reduce_by<Plain<uint32_t>, Plain<int32_t>>(reduction, sources, count, out);
    case Element::kInt64:
      return reduce_by<Plain<uint64_t>, Plain<int64_t>>(reduction, sources, count, out);
  }
}

}  // namespace bls

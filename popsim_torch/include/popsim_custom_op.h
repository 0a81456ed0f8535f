// Custom operators for popsim_torch, in C or C++: they need only this header.
// docs/own_code.md of the package explains it with examples.
//
// A shared library exports its operators through one C function,
// popsim_custom_ops(). The package looks for the function in every library that
// the process has loaded, so any code may load the library at any time. The
// interface has no C++ types, so any compiler works. In C++, POPSIM_CUSTOM_OP
// defines the function; see the end of the file.
#ifndef POPSIM_CUSTOM_OP_H
#define POPSIM_CUSTOM_OP_H

#include <stdint.h>

// The version of the C interface. A library with another version is refused.
#define POPSIM_CUSTOM_OP_VERSION 1

#ifdef __cplusplus
extern "C" {
#endif

// The dtypes of the device. Numbers have 32 bits at most: int64 of forward is
// int32 here, and float64 and bfloat16 are float32.
enum {
  POPSIM_BOOL = 0,  // a byte, 0 or 1
  POPSIM_UINT8 = 1,
  POPSIM_INT8 = 2,
  POPSIM_INT16 = 3,
  POPSIM_INT32 = 4,
  POPSIM_FLOAT16 = 5,
  POPSIM_FLOAT32 = 6
};

typedef struct popsim_tensor {
  void* data;  // contiguous, the last axis fastest; null if there are no values
  const int64_t* shape;
  int32_t rank;
  int32_t dtype;
} popsim_tensor;

enum { POPSIM_INTS = 0, POPSIM_FLOATS = 1, POPSIM_STRINGS = 2 };

typedef struct popsim_attribute {
  const char* name;
  const void* values;  // const int64_t*, const double* or const char* const*
  int64_t count;       // 1 for a single value
  int32_t type;
  int32_t is_list;
} popsim_attribute;

// The argument of an operator's functions. They must not keep pointers into it.
typedef struct popsim_call popsim_call;
struct popsim_call {
  const popsim_tensor* inputs;
  const popsim_tensor* outputs;  // none in a call of shapes()
  const popsim_attribute* attributes;
  int64_t num_inputs;
  int64_t num_outputs;
  int64_t num_attributes;

  // For shapes(): declares dtype and shape of the next output.
  void (*declare)(popsim_call* call, int32_t dtype, int32_t rank,
                  const int64_t* shape);
  // Sets the error message for the user; the function then returns a value
  // other than 0. Call this only from the thread that called the function.
  void (*fail)(popsim_call* call, const char* message);
  // For kernels: calls body(data, begin, end) for parts that cover [0, units),
  // on all threads. A unit reads or writes about numbers_per_unit numbers. The
  // parts depend on these two counts, never on the number of threads. body must
  // not fail and must not call share.
  void (*share)(popsim_call* call, int64_t units, int64_t numbers_per_unit,
                void (*body)(void* data, int64_t begin, int64_t end),
                void* data);
};

typedef struct popsim_custom_cost {
  double flops;
  double bytes;  // 0 means: every input and output once
} popsim_custom_cost;

// An operator. All functions return 0, or another value if they fail.
typedef struct popsim_custom_op popsim_custom_op;
struct popsim_custom_op {
  const popsim_custom_op* next;  // of the same library, or null
  const char* domain;
  const char* name;
  int64_t version;

  // Declares every output, from dtypes, shapes and attributes: there are no
  // values yet. It must refuse all inputs for which the kernels would read or
  // write outside of their tensors.
  int (*shapes)(popsim_call* call);
  // Reads the inputs and writes every element of the outputs. It keeps no
  // state: equal inputs give equal outputs.
  int (*kernel)(popsim_call* call);
  // The kernel of the gradient, or null. Inputs: those of the operator, its
  // outputs, and the gradient of each floating-point output (zeros if there is
  // none). Outputs: the gradient of each floating-point input.
  int (*gradient)(popsim_call* call);
  // The costs of kernel and gradient, or null.
  int (*cost)(popsim_call* call, popsim_custom_cost* cost);
  int (*gradient_cost)(popsim_call* call, popsim_custom_cost* cost);
  // 1 if the kernels call code whose results depend on the number of threads
  // of OpenMP or MKL. Such code runs with one thread.
  int32_t alone;
};

typedef struct popsim_custom_library {
  int32_t version;  // POPSIM_CUSTOM_OP_VERSION
  const popsim_custom_op* ops;
} popsim_custom_library;

// The function that a library defines; in C++, POPSIM_CUSTOM_OP defines it.
typedef const popsim_custom_library* (*popsim_custom_ops_function)(void);

#ifdef __cplusplus
}  // extern "C"
#endif

#if defined(__cplusplus) && !defined(POPSIM_CUSTOM_OP_ONLY_C)

// --- The C++ interface (C++17)
// ------------------------------------------------

#include <cstddef>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#if defined(__F16C__)
#include <immintrin.h>
#endif

// Two libraries must not share the code below, however they are loaded.
#define POPSIM_PRIVATE __attribute__((visibility("hidden")))
#define POPSIM_PUBLIC __attribute__((visibility("default"), used))

namespace popsim POPSIM_PRIVATE {

// A float16 number. It is converted to float for arithmetic, and rounded to
// nearest, ties to even.
class Half {
 public:
  Half() = default;
  explicit Half(float value) : bits_(narrowed(value)) {}
  operator float() const { return widened(bits_); }

 private:
#if defined(__F16C__)
  static float widened(uint16_t bits) { return _cvtsh_ss(bits); }
  static uint16_t narrowed(float value) { return _cvtss_sh(value, 0); }
#else
  static uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
  }
  static float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  static float widened(uint16_t half) {
    const uint32_t sign = (half & 0x8000u) << 16;
    const uint32_t rest = half & 0x7fffu;
    if (rest >= 0x7c00u) return float_of(sign | 0x7f800000u | (rest << 13));
    if (rest < 0x0400u) {  // a multiple of the smallest number
      const float size = static_cast<float>(rest) * 0x1p-24f;
      return sign != 0 ? -size : size;
    }
    return float_of(sign | ((rest << 13) + 0x38000000u));
  }
  static uint16_t narrowed(float value) {
    const uint32_t bits = bits_of(value);
    const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    const uint32_t size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) {
      return static_cast<uint16_t>(sign | 0x7e00u | ((size >> 13) & 0x3ffu));
    }
    if (size >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (size < 0x38800000u) {  // in this sum the smallest number is the last
                               // bit, so the sum is rounded correctly
      return static_cast<uint16_t>(
          sign | (bits_of(float_of(size) + 0.5f) - 0x3f000000u));
    }
    const uint32_t odd = (size >> 13) & 1u;
    return static_cast<uint16_t>(sign |
                                 ((size - 0x38000000u + 0xfffu + odd) >> 13));
  }
#endif

  uint16_t bits_;
};
static_assert(sizeof(Half) == 2);

template <typename T>
constexpr int32_t dtype_of() {
  using Number = std::remove_cv_t<T>;
  if constexpr (std::is_same_v<Number, bool>)
    return POPSIM_BOOL;
  else if constexpr (std::is_same_v<Number, uint8_t>)
    return POPSIM_UINT8;
  else if constexpr (std::is_same_v<Number, int8_t>)
    return POPSIM_INT8;
  else if constexpr (std::is_same_v<Number, int16_t>)
    return POPSIM_INT16;
  else if constexpr (std::is_same_v<Number, int32_t>)
    return POPSIM_INT32;
  else if constexpr (std::is_same_v<Number, Half>)
    return POPSIM_FLOAT16;
  else if constexpr (std::is_same_v<Number, float>)
    return POPSIM_FLOAT32;
  else
    static_assert(!sizeof(T), "not a dtype of the device");
}

inline const char* name_of(int32_t dtype) {
  static const char* const names[] = {"bool",  "uint8",   "int8",   "int16",
                                      "int32", "float16", "float32"};
  return dtype >= POPSIM_BOOL && dtype <= POPSIM_FLOAT32 ? names[dtype] : "?";
}

class Tensor {
 public:
  explicit Tensor(const popsim_tensor& tensor) : tensor_(&tensor) {}

  int32_t dtype() const { return tensor_->dtype; }
  int64_t rank() const { return tensor_->rank; }
  // The size of an axis; a negative axis counts from the last one.
  int64_t size(int64_t axis) const {
    const int64_t i = axis < 0 ? axis + rank() : axis;
    if (i < 0 || i >= rank())
      throw std::out_of_range("the tensor has no such axis");
    return tensor_->shape[i];
  }
  int64_t numel() const {
    int64_t count = 1;
    for (int32_t i = 0; i < tensor_->rank; ++i) count *= tensor_->shape[i];
    return count;
  }
  const int64_t* begin() const { return tensor_->shape; }
  const int64_t* end() const { return tensor_->shape + tensor_->rank; }
  bool same_shape(const Tensor& other) const {
    return rank() == other.rank() &&
           std::memcmp(begin(), other.begin(), sizeof(int64_t) * rank()) == 0;
  }
  // The elements; throws if they have another dtype.
  template <typename T>
  T* data() const {
    if (dtype() != dtype_of<T>()) {
      throw std::invalid_argument(std::string("a tensor of ") +
                                  name_of(dtype()) + " is not one of " +
                                  name_of(dtype_of<T>()));
    }
    return static_cast<T*>(tensor_->data);
  }

 private:
  const popsim_tensor* tensor_;
};

// The argument of a kernel or shape rule. Its methods throw if an input, output
// or attribute is missing. Kernels and rules may throw, too: the user gets the
// message as an error.
class Call {
 public:
  explicit Call(popsim_call* call) : call_(call) {}

  int64_t num_inputs() const { return call_->num_inputs; }
  int64_t num_outputs() const { return call_->num_outputs; }
  Tensor input(int64_t i) const {
    return at(call_->inputs, call_->num_inputs, i, "no input ");
  }
  Tensor output(int64_t i) const {
    return at(call_->outputs, call_->num_outputs, i, "no output ");
  }
  template <typename T>
  const T* input_data(int64_t i) const {
    return input(i).template data<const T>();
  }
  template <typename T>
  T* output_data(int64_t i) const {
    return output(i).template data<T>();
  }

  // Throws an exception with this text if a condition does not hold.
  void require(bool condition, const char* text) const {
    if (!condition) throw std::invalid_argument(text);
  }

  bool has_attribute(const char* name) const { return find(name) != nullptr; }
  // T: int64_t, double or std::string. Integers are accepted for double.
  template <typename T>
  T attribute(const char* name) const {
    const popsim_attribute& found = given(name);
    if (found.is_list) throw wrong(name, " is a list");
    return value<T>(found, 0);
  }
  template <typename T>
  T attribute(const char* name, T otherwise) const {
    return has_attribute(name) ? attribute<T>(name) : otherwise;
  }
  template <typename T>
  std::vector<T> attribute_list(const char* name) const {
    const popsim_attribute& found = given(name);
    std::vector<T> values;
    for (int64_t i = 0; i < found.count; ++i) {
      values.push_back(value<T>(found, i));
    }
    return values;
  }

  // For shape rules: declares the next output.
  void declare(int32_t dtype, const std::vector<int64_t>& shape) const {
    call_->declare(call_, dtype, static_cast<int32_t>(shape.size()),
                   shape.data());
  }
  void declare_like(const Tensor& tensor) const {
    call_->declare(call_, tensor.dtype(), static_cast<int32_t>(tensor.rank()),
                   tensor.begin());
  }

  // For kernels: calls body(begin, end) for parts that cover [0, units), on
  // several threads if there are any. The parts do not depend on the number of
  // threads. A unit reads or writes about numbers_per_unit numbers.
  template <typename Body>
  void share(int64_t units, int64_t numbers_per_unit, const Body& body) const {
    Shared<Body> shared{body, {}, nullptr};
    call_->share(call_, units, numbers_per_unit, &Shared<Body>::run, &shared);
    if (shared.error) std::rethrow_exception(shared.error);
  }

 private:
  template <typename Body>
  struct Shared {
    const Body& body;
    std::mutex mutex;
    std::exception_ptr error;

    static void run(void* data, int64_t begin, int64_t end) {
      auto& self = *static_cast<Shared*>(data);
      try {
        self.body(begin, end);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(self.mutex);
        if (!self.error) self.error = std::current_exception();
      }
    }
  };

  static Tensor at(const popsim_tensor* tensors, int64_t count, int64_t i,
                   const char* what) {
    if (i < 0 || i >= count) throw std::out_of_range(what + std::to_string(i));
    return Tensor(tensors[i]);
  }
  const popsim_attribute* find(const char* name) const {
    for (int64_t i = 0; i < call_->num_attributes; ++i) {
      const popsim_attribute& attribute = call_->attributes[i];
      if (std::strcmp(attribute.name, name) == 0) return &attribute;
    }
    return nullptr;
  }
  const popsim_attribute& given(const char* name) const {
    const popsim_attribute* found = find(name);
    if (found == nullptr) throw wrong(name, " is not given");
    return *found;
  }
  static std::invalid_argument wrong(const char* name, const char* problem) {
    return std::invalid_argument("attribute '" + std::string(name) + "'" +
                                 problem);
  }
  template <typename T>
  static T value(const popsim_attribute& found, int64_t i) {
    if constexpr (std::is_same_v<T, std::string>) {
      if (found.type == POPSIM_STRINGS) {
        return static_cast<const char* const*>(found.values)[i];
      }
    } else {
      static_assert(std::is_same_v<T, double> || std::is_same_v<T, int64_t>);
      if (found.type == POPSIM_INTS) {
        return static_cast<T>(static_cast<const int64_t*>(found.values)[i]);
      }
      if (std::is_same_v<T, double> && found.type == POPSIM_FLOATS) {
        return static_cast<T>(static_cast<const double*>(found.values)[i]);
      }
    }
    throw wrong(found.name, " has another type");
  }

  popsim_call* call_;
};

// Calls a function that may throw, for callers that cannot catch exceptions.
template <auto kFunction>
int guarded(popsim_call* call) noexcept {
  try {
    kFunction(Call(call));
    return 0;
  } catch (const std::exception& error) {
    call->fail(call, error.what());
  } catch (...) {
    call->fail(call, "an exception that is not a std::exception");
  }
  return 1;
}

template <auto kFunction>
int guarded_cost(popsim_call* call, popsim_custom_cost* cost) noexcept {
  try {
    *cost = kFunction(Call(call));
    return 0;
  } catch (const std::exception& error) {
    call->fail(call, error.what());
  } catch (...) {
    call->fail(call, "an exception that is not a std::exception");
  }
  return 1;
}

// An operator for POPSIM_CUSTOM_OP. Its functions take a `const Call&`; cost
// functions return a popsim_custom_cost.
class Op {
 public:
  Op(const char* domain, const char* name, int64_t version = 1)
      : op_{nullptr, domain,  name,    version, nullptr,
            nullptr, nullptr, nullptr, nullptr, 0} {}

  template <auto kFunction>
  Op& shapes() {
    op_.shapes = &guarded<kFunction>;
    return *this;
  }
  template <auto kFunction>
  Op& kernel() {
    op_.kernel = &guarded<kFunction>;
    return *this;
  }
  template <auto kFunction>
  Op& gradient() {
    op_.gradient = &guarded<kFunction>;
    return *this;
  }
  template <auto kFunction>
  Op& cost() {
    op_.cost = &guarded_cost<kFunction>;
    return *this;
  }
  template <auto kFunction>
  Op& gradient_cost() {
    op_.gradient_cost = &guarded_cost<kFunction>;
    return *this;
  }
  Op& alone() {
    op_.alone = 1;
    return *this;
  }
  const popsim_custom_op& entry() const { return op_; }

 private:
  popsim_custom_op op_;
};

inline popsim_custom_library& library() {
  static popsim_custom_library library{POPSIM_CUSTOM_OP_VERSION, nullptr};
  return library;
}

// Adds an operator to the list of its library.
class Registered {
 public:
  explicit Registered(const Op& op) : entry_(op.entry()) {
    entry_.next = library().ops;
    library().ops = &entry_;
  }
  Registered(const Registered&) = delete;
  Registered& operator=(const Registered&) = delete;

 private:
  popsim_custom_op entry_;
};

}  // namespace popsim POPSIM_PRIVATE

extern "C" POPSIM_PUBLIC inline const popsim_custom_library*
popsim_custom_ops() {
  return &popsim::library();
}

// Registers an operator when the library is loaded; use it outside of
// functions:
//   POPSIM_CUSTOM_OP(Op("com.acme", "Cube", 1)
//                        .shapes<cube_shapes>()
//                        .kernel<cube>());
#define POPSIM_CUSTOM_OP(...)                    \
  static const ::popsim::Registered POPSIM_NAME( \
      popsim_registered_, __COUNTER__){::popsim::__VA_ARGS__};
#define POPSIM_NAME(name, number) POPSIM_JOINED(name, number)
#define POPSIM_JOINED(name, number) name##number

#endif  // C++
#endif  // POPSIM_CUSTOM_OP_H

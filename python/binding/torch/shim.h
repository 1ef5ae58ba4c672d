// torch's C interface (torch/csrc/inductor/aoti_torch/c/shim.h), found in the libraries that Python has loaded.
//
// Weft is built without torch: the few functions that kernels need are looked up by name when weft.torch is imported,
// so one binary serves every torch that has them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tensor.h"

namespace weft::python::torch {

struct TensorObject;               // at::Tensor
struct LibraryObject;              // torch::Library
using StackValue = std::uint64_t;  // a tensor's handle, or a number
using Code = std::int32_t;         // 0: done
using BoxedKernel = void (*)(StackValue* stack, std::uint64_t inputs, std::uint64_t outputs);

// What is looked up; names are those of torch without aoti_torch_.
struct Shim {
  Code (*delete_tensor_object)(TensorObject*) = nullptr;
  Code (*new_tensor_handle)(TensorObject*, TensorObject**) = nullptr;
  Code (*get_data_ptr)(TensorObject*, void**) = nullptr;
  Code (*get_storage_size)(TensorObject*, std::int64_t*) = nullptr;
  Code (*get_dim)(TensorObject*, std::int64_t*) = nullptr;
  Code (*get_sizes)(TensorObject*, std::int64_t**) = nullptr;
  Code (*get_strides)(TensorObject*, std::int64_t**) = nullptr;
  Code (*get_dtype)(TensorObject*, std::int32_t*) = nullptr;
  Code (*get_device_type)(TensorObject*, std::int32_t*) = nullptr;
  Code (*get_device_index)(TensorObject*, std::int32_t*) = nullptr;
  Code (*empty_strided)(std::int64_t dims, const std::int64_t* sizes, const std::int64_t* strides, std::int32_t dtype,
                        std::int32_t device_type, std::int32_t device_index, TensorObject**) = nullptr;
  Code (*library_init_impl)(const char* space, const char* key, const char* file, std::uint32_t line,
                            LibraryObject**) = nullptr;
  Code (*library_impl)(LibraryObject*, const char* name, BoxedKernel) = nullptr;
  Code (*get_current_cuda_stream)(std::int32_t device, void**) = nullptr;  // null if torch has no CUDA
  std::size_t (*dtype_element_size)(std::int32_t) = nullptr;
  std::int32_t cpu = 0, cuda = 0;                                      // device types
  std::int32_t f64 = 0, f32 = 0, bf16 = 0, f16 = 0, i64 = 0, i32 = 0;  // dtypes
};

// The functions, once load() has found them.
const Shim& shim();
// Looks them up in these libraries, which are loaded already. Returns the name of one that is missing, or "".
std::string load(const std::vector<std::string>& libraries);

// Thrown for what the kernels leave to Python: a plan that is not cached (missing), or tensors that Python has to
// explain or to copy first.
struct AskPython {
  bool missing = false;
};

// An owned handle of a tensor.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(StackValue value) : handle_(reinterpret_cast<TensorObject*>(value)) {}
  Tensor(Tensor&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Tensor& operator=(Tensor&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Tensor() {
    if (handle_ != nullptr) shim().delete_tensor_object(handle_);
  }

  // A contiguous tensor where `like` lies, with elements of any value.
  static Tensor empty(const std::vector<Index>& shape, DType dtype, const Array& like);

  Tensor again() const;  // another handle of the same tensor
  Array array(bool writable = false) const;
  StackValue release() { return reinterpret_cast<StackValue>(std::exchange(handle_, nullptr)); }

 private:
  TensorObject* handle_ = nullptr;
};

// The stream that torch puts work on this device into.
std::uintptr_t current_stream(const Place& place);

}  // namespace weft::python::torch

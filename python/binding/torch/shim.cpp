#include "torch/shim.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include <dlfcn.h>

namespace weft::python::torch {
namespace {

Shim found;

void done_or_ask(Code code) {
  if (code != 0) throw AskPython{};
}

template <class Function>
bool look_up(const std::vector<void*>& libraries, const char* name, Function& function) {
  for (void* library : libraries) {
    if (void* address = dlsym(library, name)) {
      function = reinterpret_cast<Function>(address);
      return true;
    }
  }
  return false;
}

// A number that torch gives by a function of no argument.
bool look_up_number(const std::vector<void*>& libraries, const char* name, std::int32_t& number) {
  std::int32_t (*function)() = nullptr;
  if (!look_up(libraries, name, function)) return false;
  number = function();
  return true;
}

}  // namespace

const Shim& shim() { return found; }

std::string load(const std::vector<std::string>& libraries) {
  std::vector<void*> handles;
  for (const std::string& library : libraries)
    if (void* handle = dlopen(library.c_str(), RTLD_LAZY | RTLD_NOLOAD)) handles.push_back(handle);
  Shim s;
#define WEFT_SHIM(name) \
  if (!look_up(handles, "aoti_torch_" #name, s.name)) return "aoti_torch_" #name
  WEFT_SHIM(delete_tensor_object);
  WEFT_SHIM(new_tensor_handle);
  WEFT_SHIM(get_data_ptr);
  WEFT_SHIM(get_storage_size);
  WEFT_SHIM(get_dim);
  WEFT_SHIM(get_sizes);
  WEFT_SHIM(get_strides);
  WEFT_SHIM(get_dtype);
  WEFT_SHIM(get_device_type);
  WEFT_SHIM(get_device_index);
  WEFT_SHIM(empty_strided);
  WEFT_SHIM(library_init_impl);
  WEFT_SHIM(library_impl);
  WEFT_SHIM(dtype_element_size);
#undef WEFT_SHIM
  look_up(handles, "aoti_torch_get_current_cuda_stream", s.get_current_cuda_stream);
  const std::pair<const char*, std::int32_t*> numbers[] = {
      {"aoti_torch_device_type_cpu", &s.cpu}, {"aoti_torch_device_type_cuda", &s.cuda},
      {"aoti_torch_dtype_float64", &s.f64},   {"aoti_torch_dtype_float32", &s.f32},
      {"aoti_torch_dtype_bfloat16", &s.bf16}, {"aoti_torch_dtype_float16", &s.f16},
      {"aoti_torch_dtype_int64", &s.i64},     {"aoti_torch_dtype_int32", &s.i32}};
  for (const auto& [name, number] : numbers)
    if (!look_up_number(handles, name, *number)) return name;
  found = s;
  return "";
}

Tensor Tensor::empty(const std::vector<Index>& shape, DType dtype, const Array& like) {
  std::int64_t strides[8] = {};
  if (shape.size() > std::size(strides)) throw AskPython{};
  std::int64_t count = 1;
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = count;
    count *= std::max<Index>(shape[i], 1);
  }
  const std::int32_t type = dtype == DType::f64   ? found.f64
                            : dtype == DType::f32 ? found.f32
                            : dtype == DType::f16 ? found.f16
                                                  : found.bf16;
  const bool cpu = like.place.kind == DeviceKind::cpu;
  Tensor out;
  // If there is no memory, Python asks again, and torch raises its own error.
  done_or_ask(found.empty_strided(static_cast<std::int64_t>(shape.size()), shape.data(), strides, type,
                                  cpu ? found.cpu : found.cuda, cpu ? 0 : like.place.device, &out.handle_));
  return out;
}

Tensor Tensor::again() const {
  Tensor out;
  done_or_ask(found.new_tensor_handle(handle_, &out.handle_));
  return out;
}

Array Tensor::array(bool writable) const {
  std::int64_t dims = 0, bytes = 0, *sizes = nullptr, *strides = nullptr;
  std::int32_t type = 0, device_type = 0, device = 0;
  Array out;
  for (const Code code : {found.get_dim(handle_, &dims), found.get_sizes(handle_, &sizes),
                          found.get_strides(handle_, &strides), found.get_dtype(handle_, &type),
                          found.get_device_type(handle_, &device_type), found.get_device_index(handle_, &device),
                          found.get_storage_size(handle_, &bytes), found.get_data_ptr(handle_, &out.data)})
    done_or_ask(code);
  out.shape.assign(sizes, sizes + dims);
  out.strides.assign(strides, strides + dims);
  const bool none = std::find(out.shape.begin(), out.shape.end(), 0) != out.shape.end();
  if (none) {  // strides mean nothing
    Index count = 1;
    for (std::size_t i = out.shape.size(); i-- > 0; count *= out.shape[i]) out.strides[i] = count;
  } else if (bytes == 0 || out.data == nullptr) {
    throw AskPython{};  // no memory of its own, such as that of a sharded parameter which is not gathered
  }
  if (device_type == found.cuda)
    out.place = {DeviceKind::cuda, device};
  else if (device_type != found.cpu)
    throw AskPython{};
  out.item_bytes = static_cast<Index>(found.dtype_element_size(type));
  if (type == found.f64)
    out.dtype = DType::f64;
  else if (type == found.f32)
    out.dtype = DType::f32;
  else if (type == found.bf16)
    out.dtype = DType::bf16;
  else if (type == found.f16)
    out.dtype = DType::f16;
  else
    out.floating = false;
  out.writable = writable;
  return out;
}

std::uintptr_t current_stream(const Place& place) {
  if (place.kind == DeviceKind::cpu) return 0;
  if (found.get_current_cuda_stream == nullptr) throw AskPython{};
  void* stream = nullptr;
  done_or_ask(found.get_current_cuda_stream(place.device, &stream));
  return reinterpret_cast<std::uintptr_t>(stream);
}

}  // namespace weft::python::torch

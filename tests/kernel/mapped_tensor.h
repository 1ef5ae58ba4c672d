// A tensor in pages of its own, whose rows may lie far apart, and which can be closed. Pages that are never touched
// take no memory.
#pragma once

#include <stdexcept>

#include <sys/mman.h>
#include <unistd.h>

#include "index.h"
#include "kernel/attention_problem.h"

namespace weft::test {

class MappedTensor {
 public:
  // Rows are `row_bytes` apart; 0: side by side.
  MappedTensor(DType dtype, Index rows, Index heads, Index dim, Index row_bytes = 0)
      : row_bytes_(row_bytes > 0 ? row_bytes : heads * dim * size_of(dtype)), bytes_(at(rows * row_bytes_)) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED) throw std::runtime_error("mmap failed");
    view = thd(data_, dtype, rows, heads, dim);
    view.row_stride = row_bytes_ / size_of(dtype);
  }
  explicit MappedTensor(const Buffer& from, Index row_bytes = 0)
      : MappedTensor(from.view().dtype, from.view().rows, from.view().heads, from.view().dim, row_bytes) {
    from_f64(from.values(), view);
  }
  MappedTensor(const MappedTensor&) = delete;
  MappedTensor& operator=(const MappedTensor&) = delete;
  ~MappedTensor() { munmap(data_, bytes_); }

  void make_read_only() const { mprotect(data_, bytes_, PROT_READ); }
  // Rows outside can be neither read nor written; each row has whole pages.
  void close_all_but(Range open) const {
    for (Index row = 0; row < view.rows; ++row) {
      if (row >= open.begin && row < open.end) continue;
      mprotect(static_cast<char*>(data_) + row * row_bytes_, at(row_bytes_), PROT_NONE);
    }
  }

  TensorView view;

 private:
  Index row_bytes_;
  std::size_t bytes_;
  void* data_ = nullptr;
};

}  // namespace weft::test

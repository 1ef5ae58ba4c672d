// Calls of a kernel that are timed to learn, or to check, what it costs.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "weft/cost.h"
#include "weft/kernel.h"

namespace weft::tool {

struct KernelCase {
  std::string name;
  std::vector<Slice> slices;
  Index q_rows = 0, k_rows = 0, heads_q = 1, heads_k = 1;
};

KernelCase documents_case(std::string name, const std::vector<Index>& lengths, Index heads_q, Index heads_k,
                          bool causal, Index window);
// Rank `rank` of `ranks`, layout dual_chunk, keys in sequence order.
KernelCase rank_case(std::string name, const std::vector<Index>& lengths, Index heads_q, Index heads_k, Index rank,
                     Index ranks);
std::vector<KernelCase> learned_cases(bool gpu);  // small and large, dense and sparse: rates are fitted to these
std::vector<KernelCase> anchor_cases();           // others, of the size of a GPU's work

// Tensors of a case where the kernel wants them.
class KernelCall {
 public:
  KernelCall(const KernelCase& c, DType dtype, Index dim, Pass pass, const std::string& kernel);
  ~KernelCall();
  KernelCall(const KernelCall&) = delete;
  KernelCall& operator=(const KernelCall&) = delete;

  // One call, from start to end; on the CPU, of this thread's own time: kernels are to use one thread.
  double seconds();

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

bool on_gpu(const std::string& kernel);

}  // namespace weft::tool

// Arguments of executors, K/V buffers and caches as those of the kernel calls that they become.
#pragma once

#include <span>

#include "run/workspace.h"
#include "weft/kernel.h"

namespace weft::run {

// Args: ExecutorForwardArgs, KvBufferForwardArgs or KvCacheArgs.
template <class Args>
KernelForwardArgs forward_call(const Args& args, const ConstKv& kv, std::span<const Slice> slices = {}) {
  return {{.q = args.q,
           .k = kv.k,
           .v = kv.v,
           .slices = slices,
           .attention = args.attention,
           .out = args.out,
           .lse = args.lse,
           .max_logit = args.max_logit,
           .keys_per_split = args.keys_per_split,
           .place = args.place}};
}

// Args: ExecutorBackwardArgs or KvBufferBackwardArgs.
template <class Args>
KernelBackwardArgs backward_call(const Args& args, const ConstKv& kv, std::span<const Slice> slices = {}) {
  return {{.q = args.q,
           .k = kv.k,
           .v = kv.v,
           .slices = slices,
           .attention = args.attention,
           .dout = args.dout,
           .out = args.out,
           .lse = args.lse,
           .dq = args.dq,
           .dk = args.dk,
           .dv = args.dv,
           .dsink = args.dsink,
           .place = args.place}};
}

}  // namespace weft::run

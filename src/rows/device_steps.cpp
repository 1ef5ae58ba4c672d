#include "plan/device_runs.h"
#include "plan/views.h"
#include "rows/steps.h"
#include "text.h"

namespace weft {
namespace {

void check_args(const DeviceStepArgs& args) {
  check_stream("query", args.q);
  check_stream("key", args.k);
  check_mask(args.mask);
  if (args.layout.kind != LayoutKind::dual_chunk)
    throw Error(text("layout ", name(args.layout.kind), " does not cut each sequence into two pieces a rank"),
                "use layout dual_chunk, or plan with DevicePlan, which takes other layouts too");
  rows_for(args.layout.kind, args.q.tokens, args.layout.ranks);  // refuses a wrong number of ranks
  if (args.rank < 0 || args.rank >= args.layout.ranks)
    throw Error(text("rank ", args.rank, " of ", args.layout.ranks),
                text("use a rank from 0 to ", args.layout.ranks - 1));
  if (!(args.k == DeviceStream{}) && args.k.sequences != args.q.sequences)
    throw Error(text("queries have ", args.q.sequences, " sequences and keys have ", args.k.sequences),
                "give both sides the same number; a sequence may have length 0 on one side");
}

}  // namespace

void check_gather_args(const DeviceStepArgs& args) {
  check_args(args);
  if (args.step < 0 || args.step > 1)
    throw Error(text("all-gather step ", args.step), "use 0 for the queries of piece rank, 1 for piece 2*ranks-1-rank");
}

void check_ring_args(const DeviceStepArgs& args) {
  check_args(args);
  ring_tile(args.layout.ranks, args.rank, args.step);
  if (!(args.k == DeviceStream{}) && !(args.k == args.q))
    throw Error("ring steps are for self-attention, and the keys are another stream",
                "leave k out, or plan with DevicePlan, which takes any two layouts");
  if (!args.mask.causal)
    throw Error("ring steps are for causal masks, and causal = false",
                "set causal, or plan with DevicePlan, which takes any mask");
  if (args.mask.left != -1)
    throw Error(text("ring steps have no window, and left = ", args.mask.left, ": a row would need several entries"),
                "use all_gather_step, or plan with DevicePlan");
}

Index device_step_capacity(const DeviceStepArgs& args) {
  check_args(args);
  const Index n = args.q.sequences, chunk = view(args.mask).chunk;
  if (chunk == 0) return n;
  // L neighbouring rows of one piece lie in at most (L - 2) / C + 2 chunks; a rank has two pieces of each sequence.
  const Index rows = rows_for(LayoutKind::dual_chunk, args.q.tokens, args.layout.ranks);
  return min_of(n + rows, 4 * n + rows / chunk);
}

Index device_chunks_capacity(const DeviceStream& stream, Index chunk) {
  check_stream("device", stream);
  if (chunk < 1) throw Error(text("chunk size ", chunk, " is below 1"), "give 1 or more positions a chunk");
  // Every sequence has a chunk that is not full, or empty; full ones hold C tokens each.
  return stream.sequences + stream.tokens / chunk;
}

}  // namespace weft

// The keys and values of one attention layer while a pack goes through it in micro-sequences (weft/prepare.h).
#pragma once

#include <memory>
#include <memory_resource>
#include <optional>
#include <string>

#include "weft/attention.h"
#include "weft/communicator.h"
#include "weft/device.h"
#include "weft/prepare.h"

namespace weft {

// Options of a KvBuffer, the same on every rank but for `memory` and `place`.
struct KvBufferOptions {
  Index rows = 0;                          // key_rows() of the largest sequence to come
  Index heads = 0, dim_qk = 0, dim_v = 0;  // of K and V
  DType dtype = DType::f32;                // of K and V
  // Rows that no later query sees make room for others, so that with windows, chunks or short documents far fewer rows
  // are enough. The backward then needs dropped rows again (missing, gather_again).
  bool drop = false;
  std::string kernel = {};                      // as for attend
  std::pmr::memory_resource* memory = nullptr;  // null: new and delete, or the GPU's memory pool
  Place place = {};  // where the tensors of all calls lie; on a GPU the constructor is collective
  // As ExecutorOptions::checked: ranks compare options, sequences, micro-sequences and arguments, messages carry
  // checksums. Makes the constructor, begin and start_gather collective.
  bool checked = false;
  Index layer = kNoLayer;  // of the model, for checked ranks; a call that names a layer overrides it
};

// Arguments of KvBuffer::forward. Rows are those of the rank's window; shapes and dtypes are those of ForwardArgs
// (attention.h), with heads and dims of the options.
struct KvBufferForwardArgs {
  ConstTensorView q = {};  // [window, hq, dqk]
  // [window, hk, dqk] and [window, hk, dv]; left out after start_gather, or if the micro-sequence is attended again.
  ConstTensorView k = {}, v = {};
  Attention attention = {};
  TensorView out = {};        // [window, hq, dv]
  TensorView lse = {};        // [window, hq]; optional
  TensorView max_logit = {};  // [hq] over all ranks; optional
  Index keys_per_split = 0;   // as in ForwardArgs
  Place place = {};           // the device of KvBufferOptions::place; the stream may be another
  Index layer = kNoLayer;     // overrides KvBufferOptions::layer
};

// Arguments of KvBuffer::backward; the same rows. K and V are in the buffer.
struct KvBufferBackwardArgs {
  ConstTensorView q = {};      // [window, hq, dqk]
  Attention attention = {};    // as in the forward
  ConstTensorView dout = {};   // [window, hq, dv]
  ConstTensorView out = {};    // [window, hq, dv] of the forward
  ConstTensorView lse = {};    // [window, hq] of the forward
  TensorView dq = {};          // [window, hq, dqk]
  TensorView dk = {};          // [window, hk, dqk] from the queries of all ranks and micro-sequences, rounded once
  TensorView dv = {};          // [window, hk, dv] likewise
  TensorView dsink = {};       // [hq] over all ranks, of this micro-sequence; optional, learnable sink only
  Place place = {};            // as in the forward
  bool deterministic = false;  // as in BackwardArgs
  Index layer = kNoLayer;      // as in the forward
  // dk and dv may be complete only after the next backward, so that their way to the ranks that own the rows is hidden
  // under its compute; they must stay until then. The backward of micro-sequence 0 completes all; checked ranks do not
  // defer.
  bool deferred = false;
};

// How a buffer is used, for key_rows().
struct KeyRows {
  bool drop = false;   // KvBufferOptions::drop
  bool ahead = false;  // start_gather brings the keys of the next micro-sequence while one is computed
};
// Rows that a buffer needs for these micro-sequences.
WEFT_API Index key_rows(const MicroSequences& micros, const Mask& mask, KeyRows how = {});

// A buffer of K and V, and of their gradients. Memory is allocated once, for K and V by the constructor and for
// gradients by the first backward, and used again by every micro-sequence and by the next sequence. Token t lies in row
// t mod rows, or with `drop`, where fewer rows do, in the lowest row whose token no later query sees; nothing is ever
// moved inside the buffer. Belongs to one thread at a time: a call that begins while
// another is in it is an Error. All ranks make the same calls in the same order.
//
//   begin(sequence, mask);
//   for (m = 0; m < M; ++m) forward(m, ...);          // start_gather(m + 1, ...) before it: overlaps
//   for (m = M - 1; m >= 0; --m) backward(m, ...);
class WEFT_API KvBuffer {
 public:
  KvBuffer(Communicator& communicator, KvBufferOptions options);
  ~KvBuffer();
  KvBuffer(KvBuffer&&) noexcept;
  KvBuffer& operator=(KvBuffer&&) = delete;

  // Begins a new sequence; the keys of the last one are dropped. Rows before sequence.rows().begin may be filled in
  // advance (k(), v()). Error if the sequence needs more rows than there are, or if queries see keys of a later
  // micro-sequence.
  void begin(const MicroSequences& sequence, const Mask& mask);

  // Sets the place of the calls that take none (start_gather, gather_again). Error if it is another device.
  void use(const Place& place);

  // Starts the all-gather of the keys of the next micro-sequence; k and v are this rank's window and must stay until
  // forward(micro) returns.
  void start_gather(Index micro, const ConstTensorView& k, const ConstTensorView& v);
  // Attends the rank's window; gathers its keys first unless start_gather did.
  void forward(Index micro, const KvBufferForwardArgs& args);

  // Micro-sequences go in reverse.
  void backward(Index micro, const KvBufferBackwardArgs& args);
  // With `drop`: a micro-sequence whose keys must be gathered again before backward(micro); none: call backward.
  std::optional<Index> missing(Index micro) const;
  // Gathers the missing rows of that micro-sequence, and no others.
  void gather_again(Index micro, const ConstTensorView& k, const ConstTensorView& v);

  Index buffer_begin() const;       // tokens before this one are not held
  Index row_of(Index token) const;  // of the sequence that has begun
  TensorView k() const;             // [rows, heads, dim_qk]
  TensorView v() const;             // [rows, heads, dim_v]
  // Gradients from this rank's queries. backward(m) sends those of micro-sequence m to their owners; those of rows
  // before the sequence (a first document that began earlier) have no owner and stay here.
  TensorView dk() const;  // [rows, heads, dim_qk], f32 or of f64 keys f64; not given before the first backward
  TensorView dv() const;

  // Memory and traffic.
  struct Use {
    Index bytes_held = 0;      // all memory of the buffer
    Index bytes_gathered = 0;  // K and V written into the buffer, this rank's own rows included, since begin
  };
  Use use() const;

 private:
  struct Data;
  std::unique_ptr<Data> data_;
};

}  // namespace weft

// The keys and values of one attention layer while a pack goes through it in micro-sequences (weft/prepare.h).
#pragma once

#include <memory>
#include <memory_resource>
#include <optional>
#include <string>

#include "weft/attention.h"
#include "weft/communicator.h"
#include "weft/config.h"
#include "weft/device.h"
#include "weft/prepare.h"

namespace weft {

struct KvBufferOptions {
  Index rows = 0;  // key_rows() of the largest sequence to come
  Index heads = 0, dim_qk = 0, dim_v = 0;
  DType dtype = DType::f32;
  // Rows that no later query sees make room for others: with windows, chunks or short documents far fewer rows do. The
  // backward then asks for them again (missing).
  bool drop = false;
  std::string kernel = {};                      // as for attend
  std::pmr::memory_resource* memory = nullptr;  // new and delete, or the GPU's pool, if not given
  Place place = {};  // where the tensors of all calls lie; on a GPU the constructor is collective
  // As ExecutorOptions::checked: ranks compare options, sequences, micro-sequences and arguments, messages carry
  // checksums. Makes the constructor, begin and start_gather collective. On CPUs only.
  bool checked = false;
  Index layer = kNoLayer;  // whose keys these are, for checked ranks; ForwardArgs::layer of a call comes before it
};

// Rows that a buffer needs; `ahead`: the keys of the next micro-sequence come while one is computed.
struct KeyRows {
  bool drop = false, ahead = false;
};
WEFT_API Index key_rows(const MicroSequences& micros, const Mask& mask, KeyRows how = {});

// Memory is taken once, for K and V by the constructor and for gradients by the first backward, and used again by every
// micro-sequence and by the next sequence. Token t lies in row t mod rows, so nothing is ever moved inside the buffer.
// Belongs to one thread at a time: a call that begins while another is in it is an Error. All ranks make the same calls
// in the same order.
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

  // A new sequence; what the buffer held is past. Rows before sequence.rows().begin may be filled in advance (k(),
  // v()). Error if the sequence needs more rows than there are, or if the mask shows keys that come too late.
  void begin(const MicroSequences& sequence, const Mask& mask);

  // The place of the next calls that take none; it may have another stream than before. Error if it is another device.
  void use(const Place& place);

  // Starts to bring the keys of the next micro-sequence from all ranks into their rows; k and v are this rank's window
  // and must stay until forward(micro) returns.
  void start_gather(Index micro, const ConstTensorView& k, const ConstTensorView& v);
  // q, out, lse: the window's rows. k and v: as for start_gather; left out if that was called, or if the micro-sequence
  // is attended once more. max_logit is over all ranks. `slices` and `partial` must be left out.
  void forward(Index micro, const ForwardArgs& args);

  // Micro-sequences in reverse. k and v are left out: they are in the buffer; dk and dv are those of the window's rows,
  // from all ranks and all micro-sequences, rounded once. dsink is over all ranks, of this micro-sequence.
  void backward(Index micro, const BackwardArgs& args);
  // With `drop`: a micro-sequence whose keys backward(micro), the next one, needs once more; none: go on.
  std::optional<Index> missing(Index micro) const;
  // Brings the missing rows of that micro-sequence, and no others.
  void gather_again(Index micro, const ConstTensorView& k, const ConstTensorView& v);

  Index buffer_begin() const;       // tokens before this one are not held
  Index row_of(Index token) const;  // token mod rows
  TensorView k() const;             // [rows, heads, dim_qk]
  TensorView v() const;             // [rows, heads, dim_v]
  // Sums of this rank's queries. Rows of a micro-sequence that was given back are used up; rows before the sequence
  // (a first document that began in the past) are nobody's to give back, and stay.
  TensorView dk() const;  // [rows, heads, dim_qk], f32 or of f64 keys f64; not given before the first backward
  TensorView dv() const;

  struct Use {
    Index bytes_held = 0;      // all memory of the buffer
    Index bytes_gathered = 0;  // K and V written into the buffer, the own rows included, since begin
  };
  Use use() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace weft

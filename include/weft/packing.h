// Packings: where sequences lie in the packed streams of query and key tokens.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "weft/slice.h"

namespace weft {

// One side's stream of tokens. Sequence i owns tokens [offset(i), offset(i+1)); the first used(i) of them are real,
// the rest is padding. Tokens before the first offset and past the last one belong to no sequence.
class WEFT_API Stream {
 public:
  struct CuSeqlens {
    std::span<const Index> cu_seqlens;              // [n + 1] prefix sums of real lengths
    std::span<const Index> cu_seqlens_padded = {};  // [n + 1] where sequences begin, if padded; empty: as cu_seqlens
    std::optional<Index> tokens = {};               // rows of the buffer, if there are rows past the last sequence
  };

  Stream() : offsets_{0} {}
  static Stream from_lengths(std::span<const Index> lengths);
  static Stream from_cu_seqlens(const CuSeqlens& from);
  // The same from 32-bit arrays, which most frameworks use.
  static Stream from_cu_seqlens(std::span<const std::int32_t> cu_seqlens,
                                std::span<const std::int32_t> cu_seqlens_padded = {}, std::optional<Index> tokens = {});
  // Padded offsets [n + 1] and used lengths [n] ("seqused").
  static Stream from_used(std::span<const Index> offsets, std::span<const Index> used,
                          std::optional<Index> tokens = {});
  // bshd and sbhd: `batch` sequences of `length` rows; token = sequence * length + position. `used` empty: all real.
  static Stream from_batch(Index batch, Index length, std::span<const Index> used = {});

  // The same real lengths packed from token 0 on, each padded to a multiple.
  Stream padded_to(Index multiple) const;

  Index sequences() const { return static_cast<Index>(used_.size()); }
  Index tokens() const { return tokens_; }
  Index offset(Index i) const { return offsets_[static_cast<std::size_t>(i)]; }
  Index used(Index i) const { return used_[static_cast<std::size_t>(i)]; }
  Index padded(Index i) const { return offset(i + 1) - offset(i); }
  // The tokens of all sequences, padding included, which layouts deal out.
  Range extent() const { return {offsets_.front(), offsets_.back()}; }
  Index used_tokens() const;

  std::span<const Index> offsets() const { return offsets_; }
  std::span<const Index> used_lengths() const { return used_; }
  friend bool operator==(const Stream&, const Stream&) = default;

 private:
  Stream(std::vector<Index> offsets, std::vector<Index> used, std::optional<Index> tokens);

  std::vector<Index> offsets_;  // [n + 1]
  std::vector<Index> used_;     // [n]
  Index tokens_ = 0;
};

// Query and key streams with the same number of sequences; sequence i of one attends to sequence i of the other.
class WEFT_API Packing {
 public:
  Packing() = default;
  Packing(Stream both);  // self-attention; implicit, for calls that have one stream NOLINT(google-explicit-constructor)
  Packing(Stream q, Stream k);

  const Stream& q() const { return q_; }
  const Stream& k() const { return k_; }
  Index sequences() const { return q_.sequences(); }
  bool self() const { return q_ == k_; }
  Packing padded_to(Index multiple) const;

 private:
  Stream q_, k_;
};

}  // namespace weft

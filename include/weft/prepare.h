// Between a data loader and attention: documents to packs, packs to micro-sequences. See docs/prepare.md.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "weft/mask.h"
#include "weft/packing.h"
#include "weft/slice.h"

namespace weft {

// --- Packer ---

// How documents are packed.
struct PackOptions {
  enum class TooLong { refuse, split };

  Index budget = 0;                    // rows of a pack
  Index multiple = 1;                  // documents, and parts of one, are padded to a multiple of this
  bool keep_order = false;             // documents stay in the order given, at the price of more waste
  TooLong too_long = TooLong::refuse;  // a document whose padded length is above the budget
  // If above 0: no pack has more visible pairs than so many times the mean, or than the longest document by itself
  // (1.1: at most a tenth above the mean). Takes more packs where it must. Not with keep_order.
  double pair_limit = 0;
};

// Tokens [begin, begin + length) of a document: all of it unless it was split.
struct Piece {
  Index document = 0, begin = 0, length = 0;

  friend bool operator==(const Piece&, const Piece&) = default;
};

// How well documents were packed.
struct PackReport {
  Index tokens = 0;   // real ones
  Index padding = 0;  // rows that pad documents to a multiple
  Index empty = 0;    // rows at the ends of packs
  Index packs = 0;
  Index least_packs = 0;  // ceil(tokens / budget): no packer can do better
  Index split_documents = 0;
  double waste = 0;          // (padding + empty) / (packs · budget)
  double token_balance = 1;  // tokens of the fullest pack over the mean
  double pair_balance = 1;   // the same of visible pairs under a causal mask: what attention costs
};

// Documents assigned to packs of one size.
struct WEFT_API Packs {
  PackOptions options;
  std::vector<std::vector<Piece>> packs;  // pieces of a pack in the order of their documents
  PackReport report;

  // The pieces of a pack laid out one after another, padded; tokens() is the budget.
  Stream stream(Index pack) const;
};

// Packs documents by best-fit decreasing, in n log n: the longest document first, each into the fullest pack that has
// room for it. With keep_order: into the last pack, or into a new one. With pair_limit: into that of a fixed number of
// packs which has the fewest visible pairs, and with more packs until all fit. The same input gives the same packs.
WEFT_API Packs pack_documents(std::span<const Index> lengths, const PackOptions& options);

// --- Micro-sequences ---

// How a pack is split into micro-sequences.
struct MicroSplit {
  enum class Remainder { refuse, pad };

  Index ranks = 1, micros = 1;
  Remainder remainder = Remainder::refuse;  // tokens that do not divide by micros·ranks
  // Where the first document began, if rows before the first offset already hold a part of it.
  std::optional<Index> first_document_begin = {};
  // Cut where visible pairs under this mask are even, not tokens: a later micro-sequence, whose queries see more keys,
  // has fewer of them. Only tokens that do not divide by the ranks are then a remainder.
  std::optional<Mask> even_work = {};
};

// The document of padding rows.
inline constexpr Index kNoDocument = -1;

// The queries that one rank attends in one micro-sequence. Padding counts as a document of its own,
// kNoDocument: it has an entry in every list (so that lengths add up to the window), but lies in no slice.
struct WEFT_API Window {
  Index rank = 0, micro = 0;
  Index begin = 0, end = 0;              // tokens, which are rows of the K/V buffer
  Index first_document_begin = 0;        // the keys are [first_document_begin, end)
  std::vector<Index> documents = {};     // [n] of the stream; kNoDocument: padding
  std::vector<Index> lengths = {};       // [n] rows of each in the window, none of them 0
  std::vector<Index> cu_seqlens_q = {};  // [n + 1] prefix sums of lengths
  std::vector<Index> cu_seqlens_k = {};  // [n + 1] cu_seqlens_q + (begin - first_document_begin), the first one 0
  Index max_length_q = 0, min_length_q = 0;
  Index max_length_k = 0, min_length_k = 0;

  Index rows() const { return end - begin; }
  Index keys() const { return end - first_document_begin; }
  // Which entry each row belongs to, counted from 1.
  std::vector<Index> document_index_q() const;  // [rows]
  std::vector<Index> document_index_k() const;  // [keys]
  std::vector<Index> position_index() const;    // [rows] in its document, also where that began in an earlier window
};

// A pack of T tokens, processed in M micro-sequences by G ranks that gather K/V: rank r covers in micro m the tokens
// [b, b + T/(M·G)) with b = r·T/(M·G) + m·T/M, counted from the stream's first offset; or micro-sequences of even work
// (MicroSplit::even_work), each again in equal windows. Immutable.
class WEFT_API MicroSequences {
 public:
  MicroSequences(const Stream& documents, const MicroSplit& split);

  Index ranks() const { return ranks_; }
  Index micros() const { return micros_; }
  Index local() const { return local_; }  // rows of a window; of the largest, if work is even
  Index local(Index micro) const { return rows(micro).size() / ranks_; }
  Index padding() const { return padding_; }  // rows added because the tokens do not divide
  Range rows() const { return rows_; }        // all tokens, padding included
  Range rows(Index micro) const;
  Range rows(Index rank, Index micro) const;
  Window window(Index rank, Index micro) const;
  Index micro_of(Index token) const;  // the micro-sequence that has the token, one of rows()
  // Visible pairs of each window: [micros, ranks], micro after micro.
  std::vector<Index> work(const Problem& problem) const;

  // The question in rows of the K/V buffer. Queries and keys of a document end together, so both aligns mean the same.
  Problem problem(Mask mask) const;
  // A window's slices: query rows from 0, key rows counted from keys.begin. Error if the mask shows keys outside
  // `keys`.
  std::vector<Slice> slices(const Problem& problem, Index rank, Index micro, Range keys) const;
  // [rows, keys] of the window, 1 where visible, for kernels that need it. Error if keys past the window are visible.
  std::vector<std::uint8_t> dense_mask(const Problem& problem, Index rank, Index micro) const;

 private:
  // Tokens of one document, or of nobody; one after another they are all rows.
  struct Span {
    Index begin, end;
    Index keys_begin;  // where the document began
    Index document;
  };
  void find_spans(const Stream& documents);
  void cut_by_work(const Problem& problem);

  Index ranks_, micros_, local_ = 0, padding_ = 0;
  Range rows_;
  std::vector<Index> cuts_;  // [micros + 1] where micro-sequences begin and end; none: all are equal
  Packing packing_;
  std::vector<Span> spans_;
};

}  // namespace weft

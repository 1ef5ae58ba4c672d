#include "plan/offset_faults.h"

#include "text.h"

namespace weft {

Error error_of(const OffsetFault& f) {
  const std::string where = text(f.keys != 0 ? "keys" : "queries", " on the device: sequence ", f.sequence, ": ");
  const Index i = f.sequence;
  switch (f.code) {
    case OffsetFault::negative:
      return {text(where, "cu_seqlens[", i, "] = ", f.a, " is negative"), "start at row 0 or later"};
    case OffsetFault::falling:
      return {text(where, "cu_seqlens[", i + 1, "] = ", f.a, " is less than cu_seqlens[", i, "] = ", f.b),
              "give prefix sums, which never fall"};
    case OffsetFault::padded_negative:
      return {text(where, "cu_seqlens_padded[", i, "] = ", f.a, " is negative"), "start at row 0 or later"};
    case OffsetFault::padded_falling:
      return {text(where, "cu_seqlens_padded[", i + 1, "] = ", f.a, " is less than cu_seqlens_padded[", i, "] = ", f.b),
              "give prefix sums, which never fall"};
    case OffsetFault::too_long:
      return {text(where, f.a, " used tokens do not fit the ", f.b, " rows between padded offsets"),
              text("pad it to at least ", f.a, " rows")};
    case OffsetFault::past_tokens:
      return {text(where, "it ends at row ", f.a, " of a buffer of ", f.b, " rows"),
              "keep offsets within the tokens that the call was given"};
    case OffsetFault::not_multiple:
      return {text(where, "padded length ", f.a, " is not a multiple of 2*ranks = ", f.b),
              text("pad to ", ceil_div(f.a, f.b) * f.b, ", or use layout zigzag, which takes any length")};
    case OffsetFault::few_rows:
      return {text(f.keys != 0 ? "keys" : "queries", " on the device: each rank needs ", f.a, " rows and has ", f.b),
              "give as many rows as rows_for(kind, tokens, ranks) says"};
    default:
      return {text("on the device: ", f.a, " slices, entries or tiles do not fit the room for ", f.b),
              "give the capacity that the capacity function says"};
  }
}

}  // namespace weft

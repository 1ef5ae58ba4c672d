// The exact values of every output, each with the error that a kernel's arithmetic may cause.
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "check/dense.h"
#include "weft/dtype.h"

namespace weft::check {

// Rounding once moves a value by at most relative·|value| + absolute (subnormals).
struct Rounding {
  double relative = 0, absolute = 0;

  double of(double value) const { return relative * (value < 0 ? -value : value) + absolute; }
};
Rounding rounding(DType type);

// Where the values of q, k, v and dout come from. Random: drawn independently around 0, so that roundings of P and dS
// are added with independent signs.
enum class Inputs { any, random };

// How a kernel computes, and into what it writes.
struct Arithmetic {
  Rounding work = {};  // products, sums and statistics
  double order = 0;    // units of `work` that the dense bound is taken times: its terms count one rounding each
  Rounding probabilities = {};  // P and dS, if rounded between two matrix products
  Rounding out = {};            // also as the backward reads it
  Rounding gradients = {};      // dq, dk, dv
  Inputs inputs = Inputs::any;
};

// The f64 reference, rounded once to `out`; gradients are kept in f64.
Arithmetic exact_arithmetic(DType out);
// Any other kernel: f32 inside; of 16-bit inputs P and dS may be rounded to their dtype before they are multiplied.
Arithmetic kernel_arithmetic(DType inputs, DType gradients);

// Relative norm of the error of a whole tensor ("out", "lse", "dq", ..) none of whose results is small beside its
// terms; `terms`: of the longest sum of one element.
double norm_limit(DType dtype, std::string_view tensor, Index terms = 1);

// Rows and keys whose results are wanted, rising; none: all. Of rows that were not chosen lse is known too, and
// max_logit and dsink are of all.
struct Chosen {
  std::optional<std::vector<Index>> rows = {}, keys = {};
};

// Expected values; bounds are allowed errors. No dout: the gradients are left empty. Where nothing contributes to an
// element the allowed error is 0.
//
// To first order, with u the relative rounding of 16-bit probabilities and D = sum of dout·out:
//   out    sum of P·v        order·work·(dense bound) + u·sum of P·|v|                     + rounding of out
//   dv     sum of P·dout     the same with |dout|                                          + rounding of gradients
//   dq     sum of dS·k       order·work·(dense bound) + sum of (u·|dS| + slope·P·|eD|)·|k| + rounding of gradients
//   dk     sum of dS·q       the same with |q|
//   dsink  -sum of P_sink·D   order·work·(dense bound) + sum of P_sink·|eD|
// where eD, the error that D has from the forward's out, is the sum of |dout|·(u·sum of P·|v| + rounding of out). lse
// and max_logit are never rounded to 16 bits. Of random inputs, sums over u are at most six times the root of their
// squares; D's error, which a row's keys have in common, is taken times their mean.
//
// `order` holds for sums of some hundred terms. What longer ones add, by random walks of roundings and by drifts of
// equal terms, is in docs/trust.md, "Long sums".
struct Expected {
  Bounded out, lse, max_logit, dq, dk, dv, dsink;
};
Expected expected(const DenseProblem& problem, std::optional<std::span<const double>> dout, const Arithmetic& by,
                  const Chosen& chosen = {});

}  // namespace weft::check

// What a kernel answers to the question of an oracle, on one rank.
#pragma once

#include <string_view>
#include <vector>

#include "check/oracle.h"
#include "weft/kernel.h"

namespace weft::check {

// The reference computes out and lse anew in the backward, so that its gradients do not show how out was rounded.
inline Results answer_of(Oracle& oracle, const ResultTypes& types, std::string_view kernel = "") {
  Results r = oracle.nothing(types);
  const std::vector<Slice> slices = oracle.problem().global_slices();
  const Index heads = oracle.given().heads_q;
  const bool anew = kernel == "reference";
  attend({.q = oracle.q().view,
          .k = oracle.k().view,
          .v = oracle.v().view,
          .slices = slices,
          .attention = oracle.attention(),
          .out = r.out.view,
          .lse = r.lse.view,
          .max_logit = per_head(r.max_logit.data(), DType::f64, heads)},
         kernel);
  attend_backward({.q = oracle.q().view,
                   .k = oracle.k().view,
                   .v = oracle.v().view,
                   .slices = slices,
                   .attention = oracle.attention(),
                   .dout = oracle.dout().view,
                   .out = anew ? ConstTensorView{} : r.out.view,
                   .lse = anew ? ConstTensorView{} : r.lse.view,
                   .dq = r.dq.view,
                   .dk = r.dk.view,
                   .dv = r.dv.view,
                   .dsink = per_head(r.dsink.data(), DType::f64, heads)},
                  kernel);
  return r;
}

}  // namespace weft::check

// One question and its answer: the random tensors of a case and what a dense softmax in f64 makes of them, computed
// once and then compared with whatever was computed, by any ranks, layout and schedule.
#pragma once

#include <algorithm>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "check/cases/case.h"
#include "check/definition.h"
#include "check/judge.h"
#include "check/tensors.h"
#include "index.h"
#include "weft/attention.h"
#include "weft/state.h"

namespace weft::check {

struct Measure {
  std::string tensor;  // out, lse, max_logit, dq, dk, dv, dsink
  double worst = 0;    // largest |difference| over what is allowed for that element; 1 or more is a failure
  double norm = 0;     // relative norm of the difference
  std::string where;   // of the worst element: "token 5, head 1, 3"
};

struct AttendReport {
  std::string keys;  // how keys reached the ranks: sequence order, rank order, ring, or a schedule
  std::vector<Measure> measures;
  std::optional<std::string> fault = {};  // what is wrong beside the numbers
  std::string flags = {};                 // beside the case's: what gives this way again

  bool ok() const {
    return !fault && std::all_of(measures.begin(), measures.end(), [](const Measure& m) { return m.worst < 1; });
  }
};

// What was computed, in global tokens.
struct Results {
  Tensor out;
  Tensor lse, dq, dk, dv;
  std::vector<double> max_logit, dsink;  // [hq]
};
struct ResultTypes {
  DType out = DType::f32, lse = DType::f64, gradients = DType::f64;
};

class Oracle {
 public:
  // Of the case, layout, ranks and format play no part, but that `keys` looks for ends of the ranks' runs.
  // With `rows` alone, only so many query rows have a dout that is not 0 and are compared; dk and dv, to which the
  // others then add nothing, are compared whole, and max_logit is not: the least work. With `keys` too, so many rows of
  // out and dq and so many keys of dk and dv are compared, half of them at ends of documents and of ranks' runs, and
  // lse, max_logit and dsink whole; of the others that they are numbers.
  Oracle(const Case& c, const Arithmetic& by, std::optional<Index> rows = {}, std::optional<Index> keys = {});
  Oracle(const Oracle&) = delete;
  Oracle& operator=(const Oracle&) = delete;

  const Case& given() const { return case_; }
  const Problem& problem() const { return problem_; }
  Tensor& q() { return q_; }
  Tensor& k() { return k_; }
  Tensor& v() { return v_; }
  Tensor& dout() { return dout_; }
  const Attention& attention() const { return attention_; }
  double sink(Index head) const { return sink_[at(head)]; }  // -inf without one
  bool learnable() const { return case_.sink == Case::SinkKind::learnable; }

  const std::vector<Index>& rows() const { return rows_; }                 // that are compared
  const std::optional<std::vector<Index>>& keys() const { return keys_; }  // that are compared, if not all

  // The results of a token that no rank holds, which are those of one that sees nothing.
  Results nothing(const ResultTypes& types) const;
  std::vector<Measure> compare(const Results& results) const;

 private:
  Tensor make(Index rows, Index heads, Index dim, bool keys);
  void choose_rows(std::optional<Index> rows);
  std::vector<Index> choose_tokens(Index count, bool keys);
  std::vector<Index> ends(bool keys) const;  // of documents and of ranks' runs, at random
  void choose_attention();
  DenseProblem dense_problem(const std::vector<Index>& rows) const;
  // `tokens`: of the rows of `got`; none: all.
  Measure measure(const std::string& name, const std::vector<double>& got, const Bounded& want, Index heads, Index dim,
                  const std::vector<Index>* tokens) const;
  std::optional<Measure> stray_dq(const Tensor& dq) const;
  std::optional<Measure> no_number(const std::string& name, const Tensor& t) const;
  Measure compare_some(const std::string& name, const Tensor& got, const Bounded& want,
                       const std::vector<Index>* tokens) const;

  Case case_;
  Problem problem_;
  Definition definition_;
  std::mt19937_64 engine_;
  Tensor q_, k_, v_, dout_;
  std::vector<double> sink_;  // [hq], -inf without one
  Attention attention_;
  bool silent_ = false;                     // rows that are not compared have a dout of 0
  std::vector<Index> rows_;                 // query tokens that are compared, rising
  std::optional<std::vector<Index>> keys_;  // key tokens that are, if not all
  Expected want_;
};

}  // namespace weft::check

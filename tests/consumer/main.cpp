// A project of its own: finds the installed library, plans, attends, and catches its exception.
#include <cstdio>
#include <vector>

#include <weft/weft.h>

int main() {
  std::printf("weft %s\n", weft::version());
  const std::vector<weft::Index> lengths{3, 2};
  const weft::Problem problem(weft::Stream::from_lengths(lengths), {.causal = true});
  const weft::Layout layout = weft::Layout::striped(problem.packing().q(), 2);
  weft::Index pairs = 0;
  for (weft::Index rank = 0; rank < 2; ++rank)
    pairs += visible_pairs(make_plan(problem, layout.runs(rank), layout.rank_order()));
  if (pairs != 9) return 1;

  std::vector<double> qkv(5, 1.0), out(5, 0.0);
  const auto view = weft::thd(qkv.data(), weft::DType::f64, 5, 1, 1);
  const std::vector<weft::Slice> slices = problem.global_slices();
  weft::reference_forward(
      {.q = view, .k = view, .v = view, .slices = slices, .out = weft::thd(out.data(), weft::DType::f64, 5, 1, 1)});
  if (out != qkv) return 1;
  try {
    (void)weft::Layout::dual_chunk(problem.packing().q(), 2);
  } catch (const weft::Error& e) {
    std::printf("refused as it should be: %s\n", e.what());
    return 0;
  }
  return 1;
}

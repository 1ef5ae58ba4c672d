#include "calibrate/kernel_fit.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "index.h"

namespace weft::tool {
namespace {

constexpr int kUnknowns = 5;  // of a kernel: seconds a flop, a tile, a row, a key that is copied, a call
using Features = std::array<double, kUnknowns>;

// Least squares of relative errors, with nothing below 0: what would be is left out.
Features fitted(const std::vector<Features>& x, const std::vector<double>& seconds) {
  std::array<bool, kUnknowns> used;
  used.fill(true);
  for (;;) {
    double m[kUnknowns][kUnknowns + 1] = {};
    for (std::size_t n = 0; n < x.size(); ++n)
      for (int i = 0; i < kUnknowns; ++i) {
        for (int j = 0; j < kUnknowns; ++j) m[i][j] += x[n][at(i)] * x[n][at(j)] / (seconds[n] * seconds[n]);
        m[i][kUnknowns] += x[n][at(i)] / seconds[n];
      }
    for (int i = 0; i < kUnknowns; ++i) {
      if (used[at(i)]) continue;
      for (int j = 0; j <= kUnknowns; ++j) m[i][j] = i == j ? 1 : 0;
      for (int j = 0; j < kUnknowns; ++j) m[j][i] = i == j ? 1 : 0;
    }
    for (int i = 0; i < kUnknowns; ++i) {  // Gauss; the matrix is positive definite, or nearly
      const double pivot = m[i][i] != 0 ? m[i][i] : 1;
      for (int j = 0; j < kUnknowns; ++j) {
        if (j == i) continue;
        const double f = m[j][i] / pivot;
        for (int k = i; k <= kUnknowns; ++k) m[j][k] -= f * m[i][k];
      }
    }
    Features found{};
    int worst = -1;
    for (int i = 0; i < kUnknowns; ++i) {
      const double value = m[i][i] != 0 ? m[i][kUnknowns] / m[i][i] : 0;
      found[at(i)] = value;
      if (value < 0 && (worst < 0 || value * x[0][at(i)] < found[at(worst)] * x[0][at(worst)])) worst = i;
    }
    if (worst < 0) return found;
    used[at(worst)] = false;
  }
}

}  // namespace

std::vector<KernelRate> tilings_of(Pass pass, DType dtype, Index dim, bool gpu) {
  KernelRate rate{.pass = pass, .dtype = dtype, .dim = dim, .flops = 1};
  const bool narrow = dim <= 64;
  if (gpu) {
    rate.tile_q = pass == Pass::forward ? (narrow ? 192 : 128) : (narrow ? 128 : 64);
    rate.tile_k = 128;
    rate.units = 132;
    return {rate};
  }
  // CPU kernels skip by panels of 16 or 32 rows and a few keys, and copy the keys of 512 rows (backward 256).
  std::vector<KernelRate> rates;
  rate.tile_k = 8;
  rate.copy_rows = pass == Pass::forward ? 512 : 256;
  for (const Index rows : {16, 32}) {
    rates.push_back(rate);
    rates.back().tile_q = rows;
  }
  return rates;
}

namespace {

KernelRate fitted_costs(KernelRate rate, const std::vector<KernelCase>& cases, const std::vector<double>& seconds) {
  std::vector<Features> x;
  const double flops_a_pair = static_cast<double>((rate.pass == Pass::forward ? 4 : 10) * rate.dim);
  for (const KernelCase& c : cases) {
    const TileWork w = tile_work(c.slices, c.heads_q, c.heads_k, rate);
    const double covered = std::max(w.covered, w.longest * static_cast<double>(rate.units));
    x.push_back({covered * flops_a_pair, w.tiles, w.rows, w.keys, 1});
  }
  const Features found = fitted(x, seconds);
  rate.flops = found[0] > 0 ? 1 / found[0] : 1e15;
  rate.tile_seconds = found[1];
  rate.row_seconds = found[2];
  rate.key_seconds = found[3];
  rate.call_seconds = found[4];
  return rate;
}

}  // namespace

KernelRate fitted_rate(const std::vector<KernelRate>& tilings, const std::vector<KernelCase>& cases,
                       const std::vector<double>& seconds) {
  KernelRate best;
  double least = 0;
  for (const KernelRate& tiling : tilings) {
    const KernelRate rate = fitted_costs(tiling, cases, seconds);
    double errors = 0;
    for (std::size_t n = 0; n < cases.size(); ++n)
      errors += std::pow(predicted_seconds(cases[n], rate) / seconds[n] - 1, 2);
    if (&tiling == &tilings.front() || errors < least) best = rate, least = errors;
  }
  return best;
}

double predicted_seconds(const KernelCase& c, const KernelRate& rate) {
  const TensorShape shape{.dtype = rate.dtype, .dim_qk = rate.dim, .dim_v = rate.dim};
  return kernel_seconds(tile_work(c.slices, c.heads_q, c.heads_k, rate), rate, shape);
}

}  // namespace weft::tool

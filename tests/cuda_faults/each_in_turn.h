// A call of Weft's, run with each of its calls of CUDA failing in turn.
#pragma once

#include <chrono>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>

#include <gtest/gtest.h>

#include "cuda_faults/faults.h"
#include "device/device.h"
#include "weft/error.h"
#include "weft/kernel.h"

namespace weft::test {

// Why a GPU kernel cannot be tested here.
inline std::optional<std::string> absence(const std::string& kernel, DType dtype) {
  if (device::count() == 0) return "no GPU";
  for (const Kernel& k : kernels())
    if (k.name == kernel) return k.refusal({.dtype = dtype, .dim_qk = 64, .dim_v = 64, .device = DeviceKind::cuda});
  return kernel + " is not in this build";
}

struct Case {
  std::string name;
  std::function<void(long n)> reset;  // before every call, so that no answer is one of before
  std::function<void()> call;
  std::function<bool()> right;
};

// Does the text name the call that failed, as the code writes it?
inline bool names(const std::string& text, const std::string& call) {
  return text.find(call == "cudaLaunchKernelExC" ? "cudaLaunchKernelEx" : call) != std::string::npos;
}

// Call n fails. False: there is none.
inline bool fails_well(const Case& c, long n, bool lasting) {
  using Clock = std::chrono::steady_clock;
  constexpr double kSeconds = 5;
  c.reset(n);
  std::string said;
  const Clock::time_point begin = Clock::now();
  faults::arm(n, lasting);
  try {
    c.call();
  } catch (const Error& e) {
    said = e.what();
  } catch (...) {
    faults::disarm();
    throw;
  }
  const faults::Failed failed = faults::disarm();
  if (failed.call.empty()) {
    EXPECT_EQ(said, "") << c.name;
    return false;
  }
  SCOPED_TRACE(testing::Message() << c.name << ": call " << n << ", " << failed.call
                                  << (lasting ? " and all after" : ""));
  EXPECT_LT(std::chrono::duration<double>(Clock::now() - begin).count(), kSeconds);
  if (!said.empty()) {
    EXPECT_TRUE(lasting ? names(said, "cu") : names(said, failed.call)) << said;
  } else {
    EXPECT_FALSE(failed.told) << "nobody said so";
    EXPECT_TRUE(c.right()) << "it went on, and the result is wrong";
  }
  EXPECT_EQ(faults::left_behind(), 0) << "CUDA's last error is still set";
  return true;
}

// Until the call has no call of CUDA left to fail; between them it is made as usual, and must be right. Returns how
// many failed.
inline long each_in_turn(const Case& c, bool lasting) {
  for (int i = 0; i < 2; ++i) {  // the first fills what is kept between calls
    c.reset(-1);
    c.call();
    EXPECT_TRUE(c.right()) << c.name;
  }
  const faults::Ledger before = faults::ledger();
  long n = 0;
  while (!testing::Test::HasFailure() && fails_well(c, n, lasting)) {
    SCOPED_TRACE(testing::Message() << c.name << ": after call " << n << " had failed");
    c.reset(n);
    EXPECT_NO_THROW(c.call());
    EXPECT_TRUE(c.right());
    const faults::Ledger now = faults::ledger();
    EXPECT_EQ(now, before) << faults::words(now) << "; before: " << faults::words(before);
    ++n;
  }
  std::printf("%s: %ld calls\n", c.name.c_str(), n);
  return n;
}

}  // namespace weft::test

namespace weft::faults {
inline void PrintTo(const Ledger& ledger, std::ostream* to) { *to << words(ledger); }
}  // namespace weft::faults
